# make help lists the verbs.
INVENTORY ?= inventory/sandbox.py
PYTHON ?= python3
BIN := .venv/bin
export PYINFRA_PROGRESS ?= off
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

.DEFAULT_GOAL := help
.PHONY: help demo sandbox sandbox-stop sandbox-rm sandbox-ssh plan deploy rollback verify explain pin reboot status uninstall bench tour diff check test test-drill test-kernel test-engines test-bench test-staging test-upgrade test-breaker add-model release-add lock schemas format

help: ## list the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Says within seconds why a machine will not do, before anything is installed.
.PHONY: supported
supported:
	@$(PYTHON) rig/sandbox/machine_check.py

.venv/ready: requirements/control.txt files/hostkit/pyproject.toml
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "kimi-rig needs Python >= 3.11 with venv (Debian/Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@[ ! -L .venv ] || { echo "kimi-rig: .venv is a link to $$(readlink .venv) and would be made anew: remove the link, then run make again; what it leads to is left alone" >&2; exit 1; }
	@echo "installing the control side into .venv (about a minute)"
	@rm -rf .venv && $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --require-hashes -r requirements/control.txt
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-index --no-build-isolation --no-deps -e files/hostkit
	@touch $@

demo: supported .venv/ready ## boot the sandbox, deploy, start a configuration, print its answer
	@$(BIN)/python -m rig.cli.demo

sandbox: supported .venv/ready ## make and boot the box on this machine
	@$(BIN)/python -m rig.sandbox up

sandbox-stop: .venv/ready ## shut the box down
	@$(BIN)/python -m rig.sandbox stop

sandbox-rm: .venv/ready ## delete the box
	@$(BIN)/python -m rig.sandbox rm

sandbox-ssh: .venv/ready ## CMD="...": run a command in the box
	@$(BIN)/python -m rig.sandbox ssh "$$CMD"

plan: .venv/ready ## INVENTORY=... [LIMIT=host]: what a deploy would change (0 nothing, 2 something, 1 failed)
	@$(BIN)/python -m rig.cli.converge plan "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"}

deploy: .venv/ready ## INVENTORY=... [LIMIT=host]: converge (0 converged, 3 reboot pending, 1 failed)
	@$(BIN)/python -m rig.cli.converge deploy "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"}

rollback: .venv/ready ## INVENTORY=... [LIMIT=host] [TO=state]: environments, units and flags of the deploy before
	@$(BIN)/python -m rig.cli.rollback "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $${TO:+--to="$$TO"}

verify: .venv/ready ## INVENTORY=...: prove the live hosts
	@$(BIN)/python -m pytest -q tests/host --inventory "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"}

explain: .venv/ready ## INVENTORY=... [LIMIT=host] [ALL=1] [FORMAT=json]: what is set on a host, what not, and why
	@$(BIN)/python -m rig.cli.explain "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $(if $(ALL),--all) $${FORMAT:+--format="$$FORMAT"}

pin: .venv/ready ## CHECKPOINT=... [REVISION=commit] [TOKEN_FILE=...]: pin a revision, write its manifest
	@$(BIN)/python -m rig.maintain.pin "$$CHECKPOINT" $${REVISION:+--revision="$$REVISION"} $${TOKEN_FILE:+--token-file="$$TOKEN_FILE"}

reboot: .venv/ready ## INVENTORY=...: deploy, and reboot where boot-time settings wait for it
	@$(BIN)/python -m rig.cli.converge deploy "$$INVENTORY" --pyinfra=--data --pyinfra=reboot=yes $${LIMIT:+--limit="$$LIMIT"}

status: .venv/ready ## INVENTORY=... [JSON=1]: one line a host
	@$(BIN)/python -m rig.cli.status "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $(if $(JSON),--json)

uninstall: .venv/ready ## INVENTORY=... [YES=1]: remove what the hosts' records list, nothing else
	@$(BIN)/python -m rig.cli.uninstall "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $(if $(YES),--yes)

bench: .venv/ready ## INVENTORY=... CONFIGS="a b": measure configurations, then report
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@$(BIN)/python -m rig.cli.bench run "$$INVENTORY" $${LIMIT:+--limit="$$LIMIT"} $${CONFIGS:+--configs="$$CONFIGS"} $${SWEEP:+--sweep="$$SWEEP"}

tour: .venv/ready ## plan, a unit, explanation and report of an 8-card host from recorded facts: no root, no box
	@$(BIN)/python -m rig.cli.tour

diff: .venv/ready ## [REF=commit] [HOSTS=gpu.py]: what an edit of inventory/ changes: flags, units, findings; no host
	@$(BIN)/python -m rig.cli.diff $${REF:+--ref="$$REF"} $${HOSTS:+--hosts="$$HOSTS"}

check: .venv/ready ## lint, types, layers and unit tests; under a minute
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@report=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$report"; exit 1; }
	@$(BIN)/python -m rig.maintain.schemas --check
	@$(BIN)/mypy --no-error-summary rig tasks files/hostkit/rigctl inventory config.py deploy.py benchmark.py tests
	@$(BIN)/python -m pytest -q -n 2 -m 'not slow' tests/unit

test: check ## everything CI runs: check, then the box from bare to a served answer
	@$(BIN)/python -m pytest -q -n 2 -m slow tests/unit
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --require-hashes -r requirements/clients.txt
	@$(BIN)/python -m pytest -q tests/edge # apt-get install haproxy
	@$(BIN)/python -m pytest -q tests/staging tests/sandbox --ignore tests/sandbox/test_sudo.py
	@$(BIN)/python -m pytest -q -m 'not long' tests/sandbox/test_sudo.py # compares with a box that nothing else has used

test-drill: supported .venv/ready ## faults of units, adoption and interrupted deploys, on a box of its own (long)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@$(BIN)/python -m pytest -q --real tests/drill
	@$(BIN)/python -m pytest -q -m long tests/sandbox/test_sudo.py

test-upgrade: supported .venv/ready ## the previous version serves, this one deploys over it, a rollback starts (15 minutes)
	@$(BIN)/python -m pytest -q -x tests/upgrade

test-breaker: supported .venv/ready ## what a hostile package, engine, build script, mirror, host or local user can do (10 minutes, a box)
	@$(BIN)/python -m pytest -q tests/breaker

test-engines: .venv/ready ## the real CUDA wheels, patched and asked, without a GPU (25 GB, half an hour)
	@$(BIN)/python -m pytest -q tests/engines

test-kernel: .venv/ready ## kernel wheels with the real nvcc, every fault, then in a box (g++, ccache, git, libnuma-dev; 40 minutes)
	@$(BIN)/python -m pytest -q tests/kernel

test-bench: .venv/ready ## the report in a real Chromium (apt-get install chromium)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@$(BIN)/python -m pytest -q tests/browser

test-staging: .venv/ready ## staging of 64 shards, 4 GiB, with every fault (25 minutes)
	@STAGING_SHARD_BYTES=67108864 $(BIN)/python -m pytest -q tests/staging

schemas: .venv/ready ## write docs/schemas/ from the contract
	@$(BIN)/python -m rig.maintain.schemas

format: .venv/ready ## format the code
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

add-model: .venv/ready ## REPOSITORY=owner/name [CONFIG=file] [NAME=...] [RELEASE=...]: entries of a model from its config.json
	@$(BIN)/python -m rig.maintain.add_model "$$REPOSITORY" $${CONFIG:+--config="$$CONFIG"} $${NAME:+--name="$$NAME"} $${RELEASE:+--release="$$RELEASE"}

release-add: .venv/ready ## ENGINE=vllm VERSION=x: lock a release, ask it, compare it with the newest, write its block
	@PATH="$(BIN):$$PATH" $(BIN)/python -m rig.maintain.release_add "$$ENGINE" "$$VERSION"

LOCK := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --custom-compile-command "make lock"
lock: .venv/ready ## write the lock files anew from pyproject.toml and requirements.in
	@$(LOCK) pyproject.toml --extra dev -o requirements/control.txt
	@$(LOCK) files/hostkit/requirements.in -o files/hostkit/requirements.txt
	@$(LOCK) -c requirements/control.txt requirements/bench.in -o requirements/bench.txt
	@$(LOCK) -c requirements/control.txt requirements/clients.in -o requirements/clients.txt
	@$(LOCK) --no-build files/bench/requirements.in -o files/bench/requirements.txt
	@PATH="$(BIN):$$PATH" $(BIN)/python -m rig.maintain.locks
