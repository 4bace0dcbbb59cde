"""What a catalogue accepts is run to "accepted": every key of it has a run, here with a stand-in engine or elsewhere.

A key that is new in a schema fails the first test until it has its run.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rig.artifacts.units import engine_environment, run_specification
from rig.catalog.entries import ROOT, Checkpoint, Configuration, Release
from rig.plan.command_lines import command_line
from rig.plan.host_plan import HostPlan
from tests.support.plans import gpu_plan
from tests.unit.serving import Run, fields, free_port

CASES: dict[str, dict[str, Any]] = {
    # Keys of Configuration, each with a value that is not its default; dots for parts.
    "served_model_name": {"served_model_name": "kimi"},
    "gpus": {"gpus": [0, 1], "tensor_parallel": 2},
    "tensor_parallel": {"gpus": [0, 1], "tensor_parallel": 2},
    "listen.host": {"listen": {"host": "localhost"}},
    "listen.host ": {"listen": {"host": "::1"}},
    "listen.host  ": {"listen": {"host": "127.0.0.2"}},
    "listen.port": {"listen": {"port": 18999}},
    "context_length": {"context_length": 4096},
    "max_running_requests": {"max_running_requests": 3},
    "memory_fraction": {"memory_fraction": 0.5},
    "tool_call_parser": {"tool_call_parser": None},
    "reasoning_parser": {"reasoning_parser": None},
    "trust_remote_code": {"trust_remote_code": True},
    "flags": {
        "flags": {"dtype": "half", "seed": 1, "enforce-eager": True, "x-list": ["a", "b c"], "x-map": {"a": [1]}}
    },
    "environment": {"environment": {"DRILL_VALUE": 'a "b" $HOME %h ü'}},
    "secrets": {"secrets": {"DRILL_TOKEN": "/dev/null"}},
    "answer.thinks": {"answer": {"thinks": "asked"}},
    "answer.tokens": {"answer": {"tokens": 64}},
    "quiet": {"quiet": {"chat_template_kwargs": {"enable_thinking": False}}},
    "sampling": {"sampling": {"temperature": 0.5}},
    "speculation.method": {"speculation": {"method": "ngram"}},
    "speculation.steps": {"speculation": {"drafter": "custom-drafter", "steps": 5}},
    "speculation.options": {"speculation": {"drafter": "custom-drafter", "options": {"attention_backend": "x"}}},
    "speculation.break_even_length": {"speculation": {"drafter": "custom-drafter", "break_even_length": 1.1}},
    "speculation.drafter": {"speculation": {"drafter": "aq-medai-k2-drafter"}},
}
SGLANG: dict[str, dict[str, Any]] = {
    "speculation.topk": {"speculation": {"drafter": "custom-drafter", "topk": 2, "draft_tokens": 6}},
    "speculation.draft_tokens": {"speculation": {"drafter": "custom-drafter", "topk": 2, "draft_tokens": 8}},
}
RELEASES: dict[str, dict[str, Any]] = {
    "drain": {"drain": "signal"},
    "drain ": {"drain": "none"},
    "rate_counts_bonus": {"rate_counts_bonus": True},
    "harmless_log": {"harmless_log": ["something that looks bad"]},
    "environment": {"environment": {"DRILL_RELEASE": "1"}},
    "launch": {"launch": ["-m", "tests.standin"]},
}
SANDBOX = "tests/sandbox/test_deploy.py::test_the_good_drafter_serves"
"""A real CPU engine from a lock, started by its release's command line, with checkpoints made on the host."""
STAGED = "tests/staging/test_staging.py::test_hub_is_staged_whole_with_the_real_client"
ELSEWHERE: dict[str, str] = {
    # Where else a key is run, or why no engine ever sees it.
    "Configuration.extends": "no engine: the catalogue resolves it before anything else",
    "Configuration.description": "no engine: for people",
    "Configuration.accept.unequal_limit": "no engine: the catalogue's own policy",
    "Configuration.accept.differs_from_base": "no engine: the catalogue's own policy",
    "Configuration.memory_reserve": "no engine: the memory account",
    "Configuration.unproved": "no engine: which hosts get it, and whether a deploy refuses it",
    "Configuration.release": SANDBOX,
    "Configuration.target": SANDBOX,
    "Configuration.listen.networks": "tests/drill/test_units_drill.py::"
    "test_the_api_without_a_key_with_a_wrong_one_and_from_another_address",
    "Configuration.listen.private": "tests/training/test_train.py::test_nobody_else_reaches_the_extraction",
    "Configuration.speculation.layers": "tests/training/test_train.py::test_states_are_those_of_the_target",
    "Configuration.listen.open_without_key": "no engine: whether a plan takes an address that others reach",
    "Checkpoint.role": STAGED,
    "Checkpoint.path": STAGED,
    "Checkpoint.family": "no engine: what it fills in are keys of a configuration",
    "Checkpoint.title": "no engine: for people",
    "Checkpoint.architecture": "tests/engines/test_engines.py::test_newest_has_it_and_is_left_untouched",
    "Checkpoint.heads": "no engine: what a configuration may draft with",
    "Checkpoint.method": "no engine: what it fills in is a key of a configuration",
    "Checkpoint.source": "tests/sandbox/test_sources.py::test_the_other_tree_came_over_ssh_without_what_is_excluded",
    "Checkpoint.digests": "tests/staging/test_pin.py::"
    "test_known_digests_prove_files_that_the_hub_lists_by_blob_id_only",
    "Checkpoint.bandwidth_limit": "tests/staging/test_staging.py::test_bandwidth_limit_is_kept_by_all_workers_together",
    "Checkpoint.targets": "no engine: a note of the plan where another target is used",
    "Checkpoint.bytes": "no engine: space that the preflight asks for",
    "Checkpoint.shape": "no engine: the memory account before the checkpoint is there",
    "Checkpoint.memory": "no engine: the memory account where config.json misleads",
    "Checkpoint.training": "tests/sandbox/test_sources.py::"
    "test_layer_ids_stand_beside_the_drafter_where_the_engine_reads_them",
    "Checkpoint.provenance": "no engine: for people",
    "Checkpoint.notes": "no engine: for people",
    "Release.engine": "tests/unit/test_every_key.py::test_a_key_is_run_to_accepted",
    "Release.version": SANDBOX,
    "Release.package": SANDBOX,
    "Release.lock": SANDBOX,
    "Release.python": SANDBOX,
    "Release.accelerator": SANDBOX,
    "Release.index": SANDBOX,
    "Release.system_packages": SANDBOX,
    "Release.patches": "tests/engines/test_engines.py::test_patch_brings_eagle3_and_taking_it_back_removes_it",
    "Release.features": "tests/engines/test_engines.py::test_newest_has_it_and_is_left_untouched",
    "Release.kernel": "tests/kernel/test_box.py::test_the_engine_has_a_toolkit_and_the_module",
    "Release.minimum_driver": "tests/unit/test_preflight.py::test_a_fault_is_found",
    "Release.minimum_cuda": "tests/unit/test_preflight.py::test_a_fault_is_found",
    "Release.minimum_glibc": "tests/unit/test_preflight.py::test_a_fault_is_found",
    "Release.api": "tests/edge/test_haproxy.py::test_other_paths_are_not_there",
    "Release.known_bad": "tests/drill/test_engine_faults.py::test_a_release_that_is_known_to_be_bad",
}


def keys(model: type[BaseModel], path: str) -> Iterator[str]:
    """Every key of an entry; of listen, speculation and accept those within."""
    for name, field in model.model_fields.items():
        inner = [one for one in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(one, type)]
        part = next((one for one in inner if issubclass(one, BaseModel)), None)
        if part is not None and model is Configuration:
            yield from keys(part, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def test_every_key_has_its_run() -> None:
    known = {key for model in (Configuration, Checkpoint, Release) for key in keys(model, model.__name__)}
    here = {f"Configuration.{key.strip()}" for key in [*CASES, *SGLANG]} | {
        f"Release.{key.strip()}" for key in RELEASES
    }
    assert known == here | set(ELSEWHERE), "a key needs a run to `accepted`: a case here, or a test that has one"


def test_the_runs_that_are_named_are_there() -> None:
    for key, where in ELSEWHERE.items():
        if where.startswith("no engine: "):
            continue
        path, _, name = where.partition("::")
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{key}: {where}"


def started(directory: Path, plan: HostPlan, name: str) -> Run:
    """The unit of a configuration, with a stand-in where the release's engine would be."""
    entry = plan.serving[name]
    release = plan.environments[entry.release].release
    order = run_specification(plan, name).document()
    # What needs a host: cards, checkpoints of 595 GB, settings of the boot.
    ours = (
        "target_path",
        "drafter_path",
        "checkpoints",
        "gpus",
        "host_settings",
        "limits",
        "environment_path",
        "series",
    )
    content = {key: value for key, value in order.items() if key not in ours}
    made = fields(**content, target_path=str(directory / "target"))
    made["checkpoints"] = {**made["checkpoints"], "trust_remote_code": entry.trust_remote_code}
    argv = command_line(entry, release, plan.locations(entry), 5)
    (directory / "specification").write_text(json.dumps(made))
    credentials = directory / "credentials"
    credentials.mkdir()
    for variable in entry.secrets:
        (credentials / f"env.{variable}").write_text("s3cret-value\n")
    words = argv[1 + len(release.launch) :]
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in engine_environment(plan, entry).items():
            patch.setenv(variable, value)
        return Run(directory, None, *words, **{key: value for key, value in made.items() if key != "target_path"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "key"),
    [
        *(("vllm-base", key) for key in CASES),
        *(("sglang-base", key) for key in SGLANG),
        *(("release", key) for key in RELEASES),
    ],
)
def test_a_key_is_run_to_accepted(tmp_path: Path, part: str, key: str) -> None:
    plan = gpu_plan(configurations=None)
    name = "vllm-base" if part == "release" else part
    entry = plan.serving[name]
    change = {"vllm-base": CASES, "sglang-base": SGLANG, "release": RELEASES}[part][key]
    port = {"port": free_port()}
    if part == "release":
        release = plan.environments[entry.release]
        changed = release.release.model_validate({**release.release.model_dump(), **change})
        plan = replace(plan, environments={**plan.environments, entry.release: replace(release, release=changed)})
        change = {}
    listen = {"host": "127.0.0.1", **port, **change.get("listen", {})}
    given = {**entry.model_dump(exclude_unset=True), **change, "listen": listen}
    plan = replace(plan, serving={**plan.serving, name: Configuration.model_validate(given)})
    run = started(tmp_path, plan, name)
    try:
        run.until("READY=1", 30)
        started_as = run.json("started.json")
        assert started_as["proved"]["identity"]["model"] == run_specification(plan, name).model
        told = json.loads(next(line for line in run.journal.splitlines() if line.startswith("ARGV "))[5:])
        seen = json.loads(next(line for line in run.journal.splitlines() if line.startswith("KIMI "))[5:])
        wanted = {**change.get("environment", {}), **dict.fromkeys(change.get("secrets", {}), "***")}
        assert {name: seen.get(name) for name in wanted} == wanted
        for flag in change.get("flags", {}):
            assert f"--{flag}" in told
        assert "Traceback" not in run.journal
    finally:
        assert run.stop() == 0
