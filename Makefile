# make help lists the verbs: each installs .venv and calls kimi-rig. V=1 prints what otherwise goes to a log alone.
INVENTORY ?= inventory/sandbox.py
PYTHON ?= python3
BIN := .venv/bin
RIG := $(BIN)/python -m rig
# As typed: quotes, blanks, pipes and $ reach the program, never the shell's or make's own syntax.
override export CMD := $(value CMD)
override export INVENTORY := $(value INVENTORY)
override export LIMIT := $(value LIMIT)
override export FORMAT := $(value FORMAT)
override export CONFIGS := $(value CONFIGS)
override export TO := $(value TO)
override export ENGINE := $(value ENGINE)
override export VERSION := $(value VERSION)
override export SWEEP := $(value SWEEP)
override export CHECKPOINT := $(value CHECKPOINT)
override export REVISION := $(value REVISION)
override export TOKEN_FILE := $(value TOKEN_FILE)
override export REF := $(value REF)
override export HOSTS := $(value HOSTS)
override export NAME := $(value NAME)

.DEFAULT_GOAL := help
.PHONY: help demo sandbox sandbox-stop sandbox-rm sandbox-ssh plan deploy rollback verify explain pin reboot status uninstall bench train tour diff check test test-drill test-models test-kernel test-engines test-bench test-staging test-upgrade test-train test-breaker add-model release-add lock schemas format

help: ## list the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Says within seconds why a machine will not do, before anything is installed.
.PHONY: supported
supported:
	@$(PYTHON) rig/sandbox/machine_check.py

PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# What an operator needs. A complete environment is updated in place, any other is made anew.
.venv/run: requirements/run.txt pyproject.toml files/hostkit/pyproject.toml
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "kimi-rig needs Python >= 3.11 with venv (Debian/Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@[ ! -L .venv ] || { echo "kimi-rig: .venv is a link to $$(readlink .venv) and would be made anew: remove the link, then run make again; what it leads to is left alone" >&2; exit 1; }
	@echo "installing kimi-rig into .venv (about 20 s)"
	@[ -e .venv/ready ] || [ -e $@ ] || rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(PIP) --no-compile --require-hashes -r requirements/run.txt
	@$(PIP) --no-index --no-build-isolation --no-deps -e files/hostkit -e .
	@touch $@

# The same with the tools of the checks.
.venv/ready: .venv/run requirements/control.txt
	@echo "installing the tools of the checks into .venv (about a minute)"
	@$(PIP) --require-hashes -r requirements/control.txt
	@touch $@

# The box's root needs nothing of .venv: both are made at the same time.
.PHONY: box-root
box-root:
	@PYTHONPATH=files/hostkit $(PYTHON) -m rig.sandbox.build

demo: supported ## boot the sandbox, deploy, start a configuration, print its answer
	@$(MAKE) -s --no-print-directory -j2 .venv/run box-root
	@$(RIG) demo $(if $(V),-v)

sandbox: supported ## make and boot the box on this machine
	@$(MAKE) -s --no-print-directory -j2 .venv/run box-root
	@$(RIG) sandbox up

sandbox-stop: .venv/run ## shut the box down
	@$(RIG) sandbox stop

sandbox-rm: .venv/run ## delete the box
	@$(RIG) sandbox rm

sandbox-ssh: .venv/run ## CMD="...": run a command in the box
	@$(RIG) sandbox ssh "$$CMD"

plan: .venv/run ## INVENTORY=... [LIMIT=host]: what a deploy would change (0 nothing, 2 something, 1 failed)
	@$(RIG) plan "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"}

deploy: .venv/run ## INVENTORY=... [LIMIT=host]: converge (0 converged, 3 reboot pending, 1 failed)
	@$(RIG) deploy $(if $(V),-v) "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"}

rollback: .venv/run ## INVENTORY=... [LIMIT=host] [TO=state] [PLAN=1]: environments, units and flags of the deploy before
	@$(RIG) rollback $(if $(V),-v) "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $${TO:+--to="$$TO"} $(if $(PLAN),--plan)

verify: .venv/run ## INVENTORY=...: prove the live hosts
	@$(RIG) verify "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"}

explain: .venv/run ## INVENTORY=... [LIMIT=host] [ALL=1] [FORMAT=json]: what is set on a host, what not, and why
	@$(RIG) explain "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $(if $(ALL),--all) $${FORMAT:+--format="$$FORMAT"}

pin: .venv/ready ## CHECKPOINT=... [REVISION=commit] [TOKEN_FILE=...]: pin a revision, write its manifest
	@$(RIG) pin "$$CHECKPOINT" $${REVISION:+--revision="$$REVISION"} $${TOKEN_FILE:+--token-file="$$TOKEN_FILE"}

reboot: .venv/run ## INVENTORY=...: deploy, and reboot where boot-time settings wait for it
	@$(RIG) deploy $(if $(V),-v) "$$INVENTORY" --reboot $${LIMIT:+--limit="$$LIMIT"}

status: .venv/run ## INVENTORY=... [JSON=1]: one line a host
	@$(RIG) status "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $(if $(JSON),--json)

uninstall: .venv/run ## INVENTORY=... [PLAN=1] [YES=1]: remove what the hosts' records list, nothing else
	@$(RIG) uninstall $(if $(V),-v) "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $(if $(PLAN),--plan) $(if $(YES),--yes)

bench: .venv/run ## INVENTORY=... CONFIGS="a b": measure configurations, then report
	@$(PIP) --require-hashes -r requirements/bench.txt
	@$(RIG) bench run $(if $(V),-v) "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $${CONFIGS:+--configs="$$CONFIGS"} $${SWEEP:+--sweep="$$SWEEP"}

train: .venv/run ## INVENTORY=... NAME=training [LIMIT=host]: a drafter of your own, from prompts to its catalogue entry
	@$(PIP) --require-hashes -r requirements/bench.txt
	@$(RIG) train $(if $(V),-v) "$$INVENTORY" --name "$$NAME" $${LIMIT:+--limit="$$LIMIT"}

tour: .venv/run ## [PAGE=plan|unit|explain|report|talk]: plan, a unit, explanation and report of an 8-card host from recorded facts: no root, no box
	@$(RIG) tour $(PAGE)

diff: .venv/run ## [REF=commit] [HOSTS=gpu.py]: what an edit of inventory/ changes: flags, units, findings; no host
	@$(RIG) diff $${REF:+--ref="$$REF"} $${HOSTS:+--hosts="$$HOSTS"}

check: .venv/ready ## lint, types, layers and unit tests; under a minute
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@report=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$report"; exit 1; }
	@$(RIG) references --check
	@$(BIN)/mypy --no-error-summary rig tasks files/hostkit/rigctl inventory config.py deploy.py benchmark.py tests
	@$(BIN)/python -m pytest -q -n 2 -m 'not slow' tests/unit

test: check ## everything CI runs: check, then the box from bare to a served answer
	@$(BIN)/python -m pytest -q -n 2 -m slow tests/unit
	@$(PIP) --require-hashes -r requirements/clients.txt
	@$(BIN)/python -m pytest -q tests/edge # apt-get install haproxy
	@$(BIN)/python -m pytest -q -m 'not long' tests/staging tests/sandbox --ignore tests/sandbox/test_sudo.py
	@$(BIN)/python -m pytest -q -m 'not long' tests/sandbox/test_sudo.py # compares with a box that nothing else has used

test-drill: supported .venv/ready ## faults of units, adoption and interrupted deploys, on a box of its own (long)
	@$(PIP) --require-hashes -r requirements/bench.txt
	@$(BIN)/python -m pytest -q --real tests/drill
	@$(BIN)/python -m pytest -q -m long tests/sandbox/test_sudo.py

test-models: supported .venv/ready ## three model families beside each other, and what the canary catches (15 to 30 minutes, a box)
	@$(BIN)/python -m pytest -q tests/sandbox/test_models.py

test-upgrade: supported .venv/ready ## the previous version serves, this one deploys over it, a rollback starts (15 minutes)
	@$(BIN)/python -m pytest -q -x tests/upgrade

test-train: supported .venv/ready ## a drafter trained in a box from clean, served and benchmarked; every stage killed once (20 minutes)
	@$(PIP) --require-hashes -r requirements/bench.txt
	@$(BIN)/python -m pytest -q -x tests/training

test-breaker: supported .venv/ready ## what a hostile package, engine, build script, mirror, host or local user can do (10 minutes, a box)
	@$(BIN)/python -m pytest -q tests/breaker

test-engines: .venv/ready ## the real CUDA wheels, patched and asked, without a GPU (25 GB, half an hour)
	@$(BIN)/python -m pytest -q tests/engines

test-kernel: .venv/ready ## kernel wheels with the real nvcc, every fault, then in a box (g++, ccache, git, libnuma-dev; 40 minutes)
	@$(BIN)/python -m pytest -q tests/kernel

test-bench: .venv/ready ## the report in a real Chromium (apt-get install chromium)
	@$(PIP) --require-hashes -r requirements/bench.txt
	@$(BIN)/python -m pytest -q tests/browser

test-staging: .venv/ready ## staging of 64 shards, 4 GiB, with every fault (25 minutes)
	@STAGING_SHARD_BYTES=67108864 $(BIN)/python -m pytest -q tests/staging

schemas: .venv/ready ## write docs/schemas/, keys and commands in docs/reference/ from the code
	@$(RIG) references

format: .venv/ready ## format the code
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

add-model: .venv/ready ## REPOSITORY=owner/name [CONFIG=file] [NAME=...] [RELEASE=...]: entries of a model from its config.json
	@$(RIG) add-model "$$REPOSITORY" $${CONFIG:+--config="$$CONFIG"} $${NAME:+--name="$$NAME"} $${RELEASE:+--release="$$RELEASE"}

release-add: .venv/ready ## ENGINE=vllm VERSION=x: lock a release, ask it, compare it with the newest, write its block
	@PATH="$(BIN):$$PATH" $(RIG) release-add "$$ENGINE" "$$VERSION"

LOCK := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --custom-compile-command "make lock"
lock: .venv/ready ## write the lock files anew from pyproject.toml and requirements.in
	@$(LOCK) pyproject.toml --extra dev -o requirements/control.txt
	@$(LOCK) -c requirements/control.txt pyproject.toml -o requirements/run.txt
	@$(LOCK) files/hostkit/requirements.in -o files/hostkit/requirements.txt
	@$(LOCK) -c requirements/control.txt requirements/bench.in -o requirements/bench.txt
	@$(LOCK) -c requirements/control.txt requirements/clients.in -o requirements/clients.txt
	@$(LOCK) --no-build files/bench/requirements.in -o files/bench/requirements.txt
	@PATH="$(BIN):$$PATH" $(RIG) locks
