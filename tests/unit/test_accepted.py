"""What a deploy asks of an installed engine, with a stand-in for rigctl: asked once, and what nothing reads is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import PyinfraError

from rig.operations import engine_environments
from rig.operations.common import PLAN_LOG
from rigctl.contract import layout
from tests.support.plans import gpu_plan
from tests.unit.test_operations import apply, state_directory

__all__ = ["state_directory"]

ENV = gpu_plan().environments["sglang-0.5.9"]
ASKED: dict[str, Any] = {
    "env": ENV,
    "features": ["tool-parser-kimi_k2"],
    "argvs": [["python", "-m", "x"]],
    "variables": {"SGLANG_SPEC_V3": ["sglang-base"]},
}


@pytest.fixture
def rigctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answers as `rigctl probe` would; the test writes the answer and the exit code."""
    program = tmp_path / "rigctl"
    lines = ["#!/bin/sh", f"cd {tmp_path}", "echo called >> calls", "cat answer", "exit $(cat code)"]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    (tmp_path / "answer").write_text(json.dumps({"unread_variables": ["SGLANG_SPEC_V3"]}))
    (tmp_path / "code").write_text("0")
    monkeypatch.setattr(layout, "RIGCTL", str(program))
    monkeypatch.setattr(layout, "PROOFS", str(tmp_path / "proofs"))
    return tmp_path


def test_asked_once_and_an_unread_variable_is_told_each_time(
    rigctl: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = "SGLANG_SPEC_V3 of sglang-base is read nowhere in sglang-0.5.9: mistyped, or of another version"
    assert apply(engine_environments.accepted, **ASKED)
    assert told in caplog.text
    caplog.clear()
    log = rigctl / "log"
    log.touch()
    monkeypatch.setenv(PLAN_LOG, str(log))
    assert not apply(engine_environments.accepted, **ASKED)
    assert told in caplog.text
    assert told in [json.loads(line).get("notice") for line in log.read_text().splitlines()]
    assert (rigctl / "calls").read_text() == "called\n"
    assert apply(engine_environments.accepted, **ASKED | {"features": []})


def test_a_refusal_fails_the_deploy_and_is_asked_again(rigctl: Path) -> None:
    (rigctl / "code").write_text("1")
    for calls in (1, 2):
        with pytest.raises(PyinfraError):
            apply(engine_environments.accepted, **ASKED)
        assert (rigctl / "calls").read_text() == "called\n" * calls
    (rigctl / "code").write_text("0")
    assert apply(engine_environments.accepted, **ASKED)
    assert not list((rigctl / "proofs").glob("*.new"))


def test_drift_ends_the_deploy_and_is_named(rigctl: Path) -> None:
    built = replace(ENV, path=str(rigctl / "env"))
    absent = replace(ENV, name="vllm-0", path=str(rigctl / "absent"))
    (rigctl / "answer").write_text("drift: file: sglang/x.py: changed since it was proved\nnote: nccl: y: z\n")
    assert not apply(engine_environments.undrifted, environments=[built, absent])
    (rigctl / "env").mkdir()
    (rigctl / "env/kimi-rig.json").write_text("{}")
    with pytest.raises(PyinfraError):
        apply(engine_environments.undrifted, environments=[built, absent])
    assert (rigctl / "calls").read_text() == "called\n" * 2, "at the plan and at the deploy, for the one that is there"
    (rigctl / "answer").write_text("note: nccl: y: z\n")
    assert not apply(engine_environments.undrifted, environments=[built, absent])
