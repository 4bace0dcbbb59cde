"""The host's side of the benchmark: prompts, counters, aiperf's export, and a sweep that is interrupted or fails."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rigctl.bench import load, profile, sweep
from rigctl.bench.counters import Reading, window
from rigctl.bench.host import shifted_drafter
from rigctl.bench.profile import ProfileFailed, shares
from rigctl.bench.prompts import requests_of
from rigctl.checkpoints import overlay
from rigctl.contract.order import ContractError
from rigctl.contract.sweep import Round, Sweep, Workload
from rigctl.errors import RigctlError
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.specification import Specification
from tests.unit.bench_results import made_round
from tests.unit.serving import EAGLE3
from tests.unit.serving import specification as stand_in

WORKLOAD: dict[str, Any] = {
    "id": "mixed-n4",
    "prompts": "mixed",
    "context": 0,
    "concurrency": 4,
    "requests": 6,
    "output_tokens": 64,
    "ignore_eos": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 7,
}


# What 0.3.0 wrote: a sweep, and a measured cell of it.
WRITTEN = ROOT / "tests/fixtures/66d813d/bench"
SWEEP: dict[str, Any] = json.loads((WRITTEN / "sweep.json").read_text())
CELL: dict[str, Any] = json.loads((WRITTEN / "cell.json").read_text())


def specification(engine: str, *, steps: int | None = None, name: str = "a") -> Specification:
    speculation = {**EAGLE3, "steps": steps} if steps else None
    return stand_in(
        name=name, engine=engine, port=1, tool_call_parser=None, reasoning_parser=None, speculation=speculation
    )


def test_prompts_are_fixed_by_the_seed_and_never_repeat() -> None:
    workload = Workload(**WORKLOAD)

    def prompts(name: str) -> list[str]:
        return list(requests_of(workload, ["one", "two"], name, 1.0))

    assert prompts("round 1") == prompts("round 1")
    assert len({*prompts("round 1"), *prompts("round 2")}) == 12
    assert prompts("round 1")[1].endswith("two")


def test_context_follows_the_calibration() -> None:
    workload = Workload(**{**WORKLOAD, "context": 300})
    longer, shorter = (len(next(requests_of(workload, ["x"], "r", ratio)).split()) for ratio in (1.0, 1.5))
    assert longer - shorter == 100


def reading(**values: float) -> Reading:
    return Reading({key: float(value) for key, value in values.items()}, {0: values.get("drafts", 0), 1: 0})


def test_window_of_vllm_is_a_difference() -> None:
    before = reading(generated_tokens=100, drafts=10, drafted=30, accepted=12)
    after = reading(generated_tokens=185, drafts=31, drafted=93, accepted=75)
    counted = window(before, after, specification("vllm", steps=3), 1)
    assert counted.model_dump(exclude_none=True) == {
        "generated_tokens": 85,
        "drafts": 21,
        "drafted": 63,
        "accepted": 63,
        "accepted_at": [21, 0],
        "own_rate": 1.0,
    }


def test_window_of_sglang_counts_from_verifications() -> None:
    before = reading(generated_tokens=0, requests=0, verify_calls=0)
    after = reading(generated_tokens=108, requests=2, verify_calls=50, own_rate=0.37)
    counted = window(before, after, specification("sglang", steps=3), 2)
    # 108 tokens: 2 of prefills, 50 of verifications, so 56 drafts were accepted
    assert (counted.drafts, counted.drafted, counted.accepted) == (50, 150, 56)
    assert counted.own_rate == 0.37
    assert window(before, after, specification("sglang"), 2).drafts is None


def record(start: int, ttft: float, latency: float, tokens: int, error: str | None = None) -> dict[str, Any]:
    metrics = {"time_to_first_token": ttft, "request_latency": latency}
    metrics |= {"usage_completion_tokens": tokens, "usage_prompt_tokens": 10}
    return {
        "metadata": {"request_start_ns": start, "request_end_ns": start + int(latency * 1e6)},
        "metrics": {name: {"value": value, "unit": "x"} for name, value in metrics.items()},
        "error": {"message": error} if error else None,
    }


def export(directory: Path, *records: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "profile_export_aiperf.json").write_text(json.dumps({"aiperf_version": "0.13.0"}))
    (directory / "profile_export.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return directory


def test_export_becomes_a_round(tmp_path: Path) -> None:
    good = [record(0, 100, 1100, 11), record(500_000_000, 200, 1500, 27)]
    measured, generator = load.parse(export(tmp_path, *good, record(0, 1, 1, 5, error="HTTP 500")), 3)
    assert (measured.seconds, measured.output_tokens, measured.output_tok_s) == (2.0, 38, 19.0)
    assert (measured.requests, measured.errors, measured.error_summary) == (2, 1, ["HTTP 500"])
    assert measured.stream_tok_s == pytest.approx(15.0)  # 10 tokens in 1 s, 26 in 1.3 s
    assert measured.itl_ms.p50 == pytest.approx(75.0)
    assert generator == "aiperf 0.13.0"


def test_an_answer_in_one_piece_has_the_speed_of_its_whole_time(tmp_path: Path) -> None:
    """vLLM on two cores: the client got to look at the end only, which is no speed of 127 tokens in 0 s."""
    late = record(0, 1000, 1000, 128)
    late["metrics"]["http_req_chunks_received"] = {"value": 1, "unit": "x"}
    assert load.parse(export(tmp_path, late), 1)[0].stream_tok_s == pytest.approx(128.0)


def test_no_answer_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(load.LoadFailed, match=r"none of 1 requests was answered.*refused"):
        load.parse(export(tmp_path, record(0, 1, 1, 5, error="refused")), 1)


def test_key_is_in_no_file_and_no_argument() -> None:
    config = load.configuration(Workload(**WORKLOAD), specification("vllm"), Path("/x"), key=True, seconds=5)
    assert config["benchmark"]["endpoint"]["api_key"] == "${KIMI_RIG_API_KEY}"


# --- a sweep ---------------------------------------------------------------------------------------------------------


class Box:
    """A host whose units and rounds are made up: which are active, how often each was started and measured."""

    def __init__(self) -> None:
        self.active: set[str] = set()
        self.starts: list[str] = []
        self.rounds: list[str] = []
        self.refuse: set[str] = set()
        self.fail: Callable[[str], None] = lambda cell: None
        self.measured = made_round(1.0)

    def start(self, spec: Specification) -> bool:
        if spec.unit in self.active:
            return False
        self.starts.append(spec.name)
        if spec.name in self.refuse:
            raise sweep.NotAccepted("it was not accepted: out of memory")
        self.active.add(spec.unit)
        return True

    def round(
        self, run: sweep.Run, engine: Any, workload: Workload, prompts: Iterator[str], directory: Path
    ) -> tuple[Round, str]:
        cell = f"{engine.specification.name}+{workload.id}"
        self.fail(cell)
        self.rounds.append(cell)
        return self.measured, "aiperf 0.13.0"

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[:2] == ["systemctl", "stop"]:
            self.active.discard(command[2])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    made = Box()
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sweep, "installed", list)
    monkeypatch.setattr(sweep, "named", lambda name: specification("vllm", name=name))
    monkeypatch.setattr(sweep, "_start", made.start)
    monkeypatch.setattr(sweep, "_round", made.round)
    monkeypatch.setattr(sweep, "_warm_up", lambda *_: (1, None))
    monkeypatch.setattr(sweep, "_active", lambda unit: unit in made.active)
    monkeypatch.setattr(sweep, "_property", lambda unit, name: "same" if name == "InvocationID" else "oom-kill")
    monkeypatch.setattr(subprocess, "run", made.run)
    yield made
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    generator = tmp_path / "aiperf"
    generator.write_text("#!/bin/sh\n")
    generator.chmod(0o755)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({**SWEEP, "generator": str(generator)}))
    return path


def cells(plan: Path) -> dict[str, str]:
    found = {path.stem: json.loads(path.read_text()) for path in (plan.parent / "cells").glob("*.json")}
    return {name: cell["status"] for name, cell in found.items()}


def test_interrupted_sweep_repeats_no_finished_cell(box: Box, plan: Path) -> None:
    def interrupt(cell: str) -> None:
        if cell == "b+n1":
            os.kill(os.getpid(), signal.SIGTERM)  # systemctl stop

    box.fail = interrupt
    with pytest.raises(RigctlError, match="stopped; finished cells are kept"):
        sweep.run_sweep(plan)
    assert cells(plan) == {"a+n1": "measured", "a+n4": "measured"}
    assert box.active == set()
    box.fail, box.rounds = (lambda cell: None), []
    assert sweep.run_sweep(plan) == 0
    assert box.rounds == ["b+n1", "b+n1", "b+n4", "b+n4"]
    assert box.starts == ["a", "b", "b"]


def test_engine_that_dies_fails_its_cell_only(box: Box, plan: Path) -> None:
    def die(cell: str) -> None:
        if cell == "a+n1":
            box.active.clear()
            raise load.LoadFailed("aiperf ended with exit code 1")

    box.fail = die
    sweep.run_sweep(plan)
    assert cells(plan) == {"a+n1": "failed", "a+n4": "measured", "b+n1": "measured", "b+n4": "measured"}
    cause = json.loads((plan.parent / "cells" / "a+n1.json").read_text())["cause"]
    assert "the engine ended while it was measured" in cause
    assert "oom-kill" in cause
    assert box.starts == ["a", "a", "b"]  # started anew for the next cell


def test_impossible_round_fails_its_cell_by_name(box: Box, plan: Path) -> None:
    def impossible(cell: str) -> None:
        bad = {"seconds": float("nan")} if cell == "a+n1" else {}
        box.measured = made_round(1.0).model_copy(update=bad)

    box.fail = impossible
    sweep.run_sweep(plan)
    assert cells(plan) == {"a+n1": "failed", "a+n4": "measured", "b+n1": "measured", "b+n4": "measured"}
    cause = json.loads((plan.parent / "cells" / "a+n1.json").read_text())["cause"]
    assert cause == "a, n1: rounds.0.seconds is nan; rounds.1.seconds is nan"


def test_cell_that_an_older_version_accepted_is_measured_again(box: Box, plan: Path) -> None:
    (plan.parent / "cells").mkdir()
    path = plan.parent / "cells" / "a+n1.json"
    path.write_text(json.dumps(CELL))
    (plan.parent / "cells" / "b+n4.json").write_text(json.dumps({**CELL, "configuration": "b", "rounds": []}))
    sweep.run_sweep(plan)
    assert box.rounds == ["a+n4", "a+n4", "b+n1", "b+n1", "b+n4", "b+n4"]
    assert json.loads(path.read_text()) == CELL


def test_configuration_that_does_not_start_is_tried_once(box: Box, plan: Path) -> None:
    box.refuse = {"a"}
    sweep.run_sweep(plan)
    assert cells(plan) == {"a+n1": "failed", "a+n4": "failed", "b+n1": "measured", "b+n4": "measured"}
    assert box.starts == ["a", "b"]


def test_full_disk_ends_the_sweep_and_keeps_what_is_finished(
    box: Box, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(cell: str) -> None:
        if cell == "a+n4":
            raise OSError(28, "No space left on device")

    box.fail = full
    with pytest.raises(RigctlError, match="No space left on device; finished cells are kept"):
        sweep.run_sweep(plan)
    assert cells(plan) == {"a+n1": "measured"}
    monkeypatch.setattr(sweep.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 * 1024**2}))
    with pytest.raises(RigctlError, match="has 5 MiB free, 200 are needed"):
        sweep.run_sweep(plan)


def test_progress_says_what_is_left(box: Box, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.run_sweep(plan)
    said = capsys.readouterr().out
    assert "0/4 cells done; a: starting" in said
    assert "1/4 cells done, about 0 s left; a, n4: warming up" in said
    assert said.endswith("4/4 cells done, about 0 s left; the sweep is complete\n")


def test_wrong_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"id": "x"}')
    with pytest.raises(ContractError, match=r"sweep\.json: format 0 is of an old version"):
        Sweep.read(tmp_path / "sweep.json")


def test_shifted_drafter_is_links_and_a_config(tmp_path: Path) -> None:
    drafter, target, made = tmp_path / "drafter", tmp_path / "target", tmp_path / "made"
    for directory, config in ((drafter, {"hidden_size": 8}), (target, {"text_config": {"num_hidden_layers": 61}})):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
    (drafter / "model.safetensors").write_bytes(b"weights")
    assert shifted_drafter(drafter, made, target, 1) == [3, 31, 59]
    assert json.loads((made / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((drafter / "config.json").read_text()) == {"hidden_size": 8}
    assert overlay.source(made) == drafter, "its files are proved as the checkpoint behind it"
    with pytest.raises(RigctlError, match="layer ids are"):
        shifted_drafter(drafter, made, target, 4)


def test_share_of_all_reduce_over_all_ranks() -> None:
    def kernel(name: str, microseconds: float) -> profile.Kernel:
        return profile.Kernel(cat="kernel", name=name, dur=microseconds)

    ranks = [
        [kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 500), kernel("marlin_moe", 500)],
        [kernel("void vllm::cross_device_reduce_1stage<x>", 520), kernel("ncclDevKernel_AllGather_RING", 480)],
    ]
    assert shares(ranks) == {"all_reduce_share": 0.51, "kernel_seconds": 0.002}
    with pytest.raises(ProfileFailed, match="no GPU kernels"):
        shares([[]])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_profile_is_of_kernels_alone_and_leaves_no_trace(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang records Python's stacks unless it is told otherwise; vLLM's start takes no settings."""
    said: list[tuple[str, Any]] = []
    trace = tmp_path / "profile" / "1.0-TP-0.trace.json.gz"
    trace.parent.mkdir()

    def post(_: Engine, path: str, content: Any = None, *, timeout: float) -> None:
        assert timeout
        said.append((path, content))
        if path == "stop_profile":
            events = [{"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "dur": 4}]
            trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"cat": "cpu_op"}]}).encode()))

    monkeypatch.setattr(Engine, "post", post)
    monkeypatch.setattr(profile, "POLL_SECONDS", 0)
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    asked = Engine(specification(engine))
    profile.start(asked)
    assert profile.stop(asked) == {"all_reduce_share": 1.0, "kernel_seconds": 4e-6}
    assert said == [("start_profile", profile.RECORDED if engine == "sglang" else None), ("stop_profile", None)]
    assert not trace.exists()
