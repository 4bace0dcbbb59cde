"""Silent loads, frozen engines, drafters that do not pay: judged by numbers, with a clock of the test's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from rig.bench.acceptance_units import Drafting, own_rate_definition
from rigctl.contract.limits import Limits
from rigctl.supervisor import watchdog
from rigctl.supervisor.activity import Activity, Patience, measure
from rigctl.supervisor.engine_client import Engine, Metrics, Speculation, read_metrics
from rigctl.supervisor.measurement_pause import MARK, is_measured, undisturbed
from rigctl.supervisor.metrics_file import exposition
from rigctl.supervisor.watchdog import Watch
from tests.unit.serving import EAGLE3, limits, specification
from tests.unit.test_listening import OTHER

FIXTURES = Path(__file__).parent / "fixtures"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def replay(trace: list[dict[str, float]], until_minutes: float) -> tuple[str | None, float]:
    """The verdict over a recorded load, and the minute it came."""
    clock = Clock()
    patience = Patience(Limits(**limits()), clock)
    begun = clock.now
    for row in trace:
        while clock.now < begun + min(row["minute"], until_minutes) * 60:
            clock.now += 10
            if verdict := patience.verdict():
                return verdict, (clock.now - begun) / 60
        patience.heard(int(row["lines"]))
        patience.observe(Activity({1: (row["cpu"], int(row["io_mib"]) << 20)}, int(row["gpu_mib"])))
    return patience.verdict(), (clock.now - begun) / 60


def test_a_load_of_35_minutes_with_20_silent_ones_is_left_alone() -> None:
    trace = json.loads((FIXTURES / "load-35min.json").read_text())["samples"]
    assert trace[-1]["minute"] == 35
    silent = [row for row in trace if 5 < row["minute"] <= 25]
    assert len({(row["lines"], row["io_mib"], row["gpu_mib"]) for row in silent}) == 1, "processor time alone moves"
    assert replay(trace, 35) == (None, 35)


def test_a_frozen_load_is_told_within_the_limit() -> None:
    trace = json.loads((FIXTURES / "load-35min.json").read_text())["samples"]
    frozen = [row if row["minute"] <= 5 else {**trace[10], "minute": row["minute"]} for row in trace]
    assert trace[10]["minute"] == 5
    verdict, minute = replay(frozen, 35)
    assert verdict is not None and "no progress for 25 min" in verdict
    assert 30 <= minute < 31


def test_a_collective_that_spins_is_told_as_well() -> None:
    still = {"lines": 1, "io_mib": 0, "gpu_mib": 500}
    spinning: list[dict[str, float]] = [{**still, "minute": m, "cpu": m * 480} for m in range(120)]
    verdict, minute = replay(spinning, 120)
    assert verdict is not None and "processor time, but no new log line" in verdict
    assert 60 <= minute < 62


def test_a_jump_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e12)
    patience = Patience(Limits(**limits()))
    watch = Watch(Engine(specification()))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert patience.verdict() is None
    assert watch.verdict() is None


def test_activity_is_read_from_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    (tmp_path / "stat").write_text("btime 1700000000\n")
    process = tmp_path / "7"
    process.mkdir()
    (process / "stat").write_text("7 (a) b) S " + " ".join(["0"] * 10) + " 150 50 " + " ".join(["0"] * 30))
    (process / "io").write_text("rchar: 10\nwchar: 5\nsyscr: 1\nsyscw: 1\nread_bytes: 100\nwrite_bytes: 3\n")
    before = Activity({7: (0.5, 15), 8: (9.0, 9)})
    now = measure([7, 9], [])
    assert now.since(before) == (1.5, 100)


class Fake(Engine):
    """An engine whose answers and counters the test gives."""

    def __init__(self) -> None:
        super().__init__(specification())
        self.now = Metrics(pulse=(0,), speculation=Speculation(0, 0, 0))
        self.fault: Exception | None = None
        self.content = "ready"

    def chat(self, *_: object, **__: object) -> dict[str, object]:
        if self.fault:
            raise self.fault
        return {"message": {"content": self.content}}

    def metrics(self, timeout: float = 5) -> Metrics:
        return self.now

    def moved(self, drafts: int, accepted: int) -> None:
        before = self.now.speculation or Speculation(0, 0, 0)
        after = before.plus(Speculation(drafts, drafts * 3, accepted))
        self.now = Metrics(pulse=(self.now.pulse[0] + drafts,), speculation=after)


def watched() -> tuple[Fake, Clock, Watch]:
    engine, clock = Fake(), Clock()
    watch = Watch(engine, clock)
    watch.round()
    return engine, clock, watch


def test_a_queue_that_makes_progress_is_alive() -> None:
    engine, clock, watch = watched()
    engine.fault = requests.Timeout()
    for _ in range(60):
        clock.now += 60
        engine.moved(1, 1)
        watch.round()
    assert watch.verdict() is None
    for _ in range(9):
        clock.now += 60
        watch.round()
    assert watch.verdict() is None
    clock.now += 121
    assert "frozen" in (watch.verdict() or "")


def test_nothing_is_asked_while_a_benchmark_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    engine, _, watch = watched()
    engine.fault = requests.ConnectionError("asked")
    with undisturbed(engine.specification):
        engine.moved(1, 1)
        watch.round()
        assert watch.errors == []
    watch.round()
    assert watch.errors, "the mark outlived the benchmark"
    assert Path(str(engine.specification.runtime), MARK).exists()
    assert not is_measured(engine.specification), "a file that nobody holds says nothing"


def test_a_degenerate_answer_in_service_is_an_error() -> None:
    engine, _, watch = watched()
    engine.content = "!" * 30
    for _ in range(3):
        engine.moved(1, 1)
        watch.round()
    assert "degenerate" in (watch.verdict() or "")


def test_a_second_listener_after_acceptance_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of the unit are this process alone; the stand-in engine and the stranger share the port."""
    engine, _, watch = watched()
    monkeypatch.setattr(watchdog, "members", lambda: [os.getpid()])
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ours.bind(("127.0.0.1", engine.specification.endpoint.port))
        ours.listen()
        watch.round()
        assert watch.errors == []
        command = [sys.executable, "-c", OTHER, str(engine.specification.endpoint.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "listening\n"
            for _ in range(3):
                engine.moved(1, 1)
                watch.round()
            assert f"also answered by process {other.pid} outside this unit" in watch.text()
            assert "3 times in a row" in (watch.verdict() or "")
            other.communicate()


def exported_by(watch: Watch) -> dict[str, float]:
    families = text_string_to_metric_families(exposition(specification(), watch))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["configuration"] for sample in samples} == {"drill"}
    return {sample.name: sample.value for sample in samples}


def test_what_is_not_known_is_not_exported() -> None:
    engine, _, watch = watched()
    assert "kimi_acceptance_length" not in exported_by(watch)
    engine.fault = requests.HTTPError()
    watch.round()
    exported = exported_by(watch)
    assert "kimi_answer_seconds" not in exported
    assert exported["kimi_wrong_answers"] == 1


@pytest.mark.parametrize(("accepted", "length", "below"), [(500, 2.0, False), (100, 1.2, True)])
def test_acceptance_length_is_computed_from_others_steps(accepted: int, length: float, below: bool) -> None:
    engine, _, watch = watched()
    engine.moved(500, accepted)
    watch.round()
    assert watch.acceptance_length == length
    assert watch.below_floor is below
    assert ("BELOW 1.25: slower than without a drafter" in watch.text()) is below
    exported = exported_by(watch)
    assert exported["kimi_acceptance_length"] == length
    assert exported["kimi_acceptance_length_floor"] == 1.25
    assert exported["kimi_acceptance_below_floor"] == below


def test_the_floor_is_the_break_even_length_where_it_is_known() -> None:
    known = specification(speculation={**EAGLE3, "break_even_length": 1.9})
    assert known.acceptance_floor == 1.9
    assert specification().acceptance_floor == 1.25


# What the engines call a rate is not one unit: the same drafter, never right, in both definitions.
@pytest.mark.parametrize(
    ("fixture", "engine", "counts_bonus", "length"),
    [
        ("sglang-0.5.9-never.txt", "sglang", True, 1.0),
        ("sglang-0.5.23-never.txt", "sglang", False, 1.0),
        ("vllm-0.32.0-always.txt", "vllm", False, 4.0),
    ],
)
def test_both_definitions_of_the_engines_rates(fixture: str, engine: str, counts_bonus: bool, length: float) -> None:
    found = read_metrics(engine, (FIXTURES / "metrics" / fixture).read_text(), 4)
    if found.own_rate is not None:
        version = "0.5.9" if counts_bonus else "0.5.23"
        definition = own_rate_definition(engine, version)
        assert definition.to_length(found.own_rate, Drafting(steps=3, draft_tokens=4)) == pytest.approx(length)
        assert found.own_rate == (0.25 if counts_bonus else 0.0)
    if found.speculation is not None:
        assert found.speculation.acceptance_length == pytest.approx(length)
    else:
        assert found.own_length == length, "0.5.9 has gauges only; its length counts the bonus token, as ours does"


def test_february_in_acceptance_lengths() -> None:
    four = Drafting(steps=3, draft_tokens=4)
    assert own_rate_definition("sglang", "0.5.9").to_length(0.42, four) == pytest.approx(1.68)
    assert own_rate_definition("sglang", "0.5.11").to_length(0.42, four) == pytest.approx(2.26)
    assert own_rate_definition("vllm", "0.16.0").to_length(0.15, Drafting(steps=5)) == pytest.approx(1.75)
