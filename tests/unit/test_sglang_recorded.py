"""What SGLang 0.5.16 wrote on two GPUs (docs/lab/gpu.md), read by the parts that read it on a host."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from rigctl.guarded import Place
from rigctl.services import leftovers
from rigctl.supervisor.engine_client import Speculation, read_metrics
from rigctl.supervisor.engine_log import EngineLog, RunFile
from rigctl.supervisor.load_phases import phase_of
from tests.gpu import run
from tests.support.plans import catalog

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = FIXTURES / "sglang"
GPUS = json.loads((FIXTURES / "gpu" / "h200-x2.json").read_text())
HARMLESS = catalog().releases["sglang-0.5.16"].harmless_log


def read_log(name: str, directory: Path) -> EngineLog:
    """A log as the supervisor has it once the engine has ended."""
    with (directory / "journal").open("wb") as journal:
        log = EngineLog("sglang", HARMLESS, [], RunFile(Place(str(directory)), 2, 1), journal)
        reader, writer = os.pipe()
        log.follow(reader)
        with os.fdopen(writer, "wb") as engine:
            engine.write((RECORDED / name).read_bytes())
        log.catch_up(10)
        log.finish()
    return log


def test_the_phases_of_a_load_are_told_in_order() -> None:
    lines = (RECORDED / "0.5.16-worker-killed.log").read_text().splitlines()
    told = [phase.rstrip("0123456789/ ") for line in lines if (phase := phase_of("sglang", line))]
    assert [phase for phase, _ in itertools.groupby(told)] == [
        *("loading weights", "weights loaded, preparing the model") * 2,  # target and drafter
        "key-value cache allocated",
        *("capturing graphs", "graphs captured") * 3,  # verification, draft, draft extension
        *("starting the HTTP server", "warmed up", "starting the HTTP server"),
    ]


def test_an_engine_that_kills_itself_is_told_from_one_that_was_killed(tmp_path: Path) -> None:
    log = read_log("0.5.16-worker-killed.log", tmp_path)
    assert log.child_failed
    # The killed worker said nothing; the other one noticed.
    assert log.last_error is not None
    assert log.last_error.startswith("RuntimeError: [")
    assert log.last_error.endswith("Connection reset by peer")


def test_the_error_that_ended_a_load_is_found_among_others(tmp_path: Path) -> None:
    log = read_log("0.5.16-no-ninja.log", tmp_path)
    assert log.child_failed
    assert log.last_error == "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"


@pytest.mark.parametrize(
    ("name", "counted", "own_rate", "own_length"),
    [
        ("always", Speculation(50, 150, 147), 1.0, 4.0),
        ("half", Speculation(80, 240, 117), 0.475, 2.425),
        ("never", Speculation(197, 591, 0), 0.0, 1.0),
        ("base", None, None, None),
    ],
)
def test_counters_are_derived_from_its_metrics(
    name: str, counted: Speculation | None, own_rate: float | None, own_length: float | None
) -> None:
    draft_tokens = None if name == "base" else 4
    found = read_metrics("sglang", (RECORDED / f"0.5.16-{name}.metrics").read_text(), draft_tokens)
    assert found.speculation == counted
    assert (found.own_rate, found.own_length) == (own_rate, own_length)


def test_what_it_counts_is_what_the_tiny_model_predicts() -> None:
    for entry, kind in run.DRAFTS.items():
        if kind is None or not entry.startswith("sglang"):
            continue
        lives = [life for life in GPUS[kind]["found"].values() if isinstance(life, dict)]
        assert len(lives) == 2
        assert [life["ask"]["counted"] for life in lives] == [run.counters(run.Variant(entry, (0,), None))] * 2
        assert [life["ask"]["max_running_requests"] for life in lives] == [48 if kind == "half" else 32] * 2


def test_its_segments_are_known(tmp_path: Path) -> None:
    left = GPUS["tensor"]["found"]["shared_memory"]
    for name in left:
        (tmp_path / name).touch()
    (tmp_path / "other").touch()
    (tmp_path / "empty").mkdir()
    assert [path.name for path in leftovers.unused_segments(tmp_path, tmp_path / "empty")] == sorted(left)


def test_the_page_shows_the_run_as_it_was() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab" / "gpu.md").read_text()
    assert "\n".join(run.rows(GPUS)) in page
