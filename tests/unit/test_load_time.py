"""How long a configuration takes from start to accepted, with its files cold and warm, beside a plain read of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rig.bench import report
from rigctl.bench import load_time
from rigctl.page_cache import BLOCK, cached
from tests.unit.bench_results import made_result
from tests.unit.serving import specification


class Unit:
    """A unit whose start reads its files, and how much of them was in memory then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(2 * BLOCK))
        self.said: list[str] = []

    def start(self) -> None:
        self.said.append(f"start with {cached(self.path) // BLOCK}")
        time.sleep(0.05)

    def stop(self) -> None:
        self.said.append("stop")


def test_it_starts_cold_then_warm_and_runs_afterwards(tmp_path: Path) -> None:
    unit = Unit(tmp_path / "model.safetensors")
    found = load_time.measure(specification(target_path=str(tmp_path), drafter_path=None), unit.start, unit.stop)
    if unit.said[1] != "start with 0":
        pytest.skip("this file system keeps pages (tmpfs)")
    assert unit.said == ["stop", "start with 0", "stop", "start with 2"]
    assert found["bytes"] == 2 * BLOCK
    assert found["accepted_cold_seconds"] >= 0.05 <= found["accepted_warm_seconds"]
    assert {"read_cold_seconds", "read_warm_seconds"} < found.keys()


def test_files_that_memory_does_not_hold_are_started_cold_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(tmp_path / "model.safetensors")
    monkeypatch.setattr(load_time, "cached", lambda _: BLOCK)
    found = load_time.measure(specification(target_path=str(tmp_path), drafter_path=None), unit.start, unit.stop)
    assert len(unit.said) == 2
    assert "accepted_warm_seconds" not in found


def test_the_report_shows_both_beside_the_read() -> None:
    cold = {"bytes": 24e9, "read_cold_seconds": 10.0, "accepted_cold_seconds": 45.0}
    warm = {"read_warm_seconds": 4.0, "accepted_warm_seconds": 30.0}
    results = [
        made_result("small", 1, [100.0, 101.0]).model_copy(update={"load_times": cold | warm}),
        made_result("large", 1, [100.0, 101.0]).model_copy(update={"load_times": cold}),
    ]
    page = report.markdown(results)
    assert "| small | 24.0 | 10.0 | 45.0 | 4.50 | 4.0 | 30.0 | 7.50 |" in page
    assert "| large | 24.0 | 10.0 | 45.0 | 4.50 | not in memory |" in page
