"""Back to what was displaced: decided by the monotonic clock, since the other one may jump."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rigctl.specification
from rigctl import switching
from rigctl.ended import boot_id
from tests.unit.serving import specification

NEW, OLD = specification(name="new"), specification(name="old")
Recorded = Callable[..., str | None]


@pytest.fixture
def displaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What `new`, which began at second 1000 of this boot, has displaced when `old` ended as given."""
    monkeypatch.setattr(rigctl.specification, "STATE", tmp_path)
    monkeypatch.setattr(switching, "installed", lambda: [NEW, OLD])
    monkeypatch.setattr(switching, "properties", lambda *_: {"InactiveExitTimestampMonotonic": "1000000000"})

    def found(**ended: Any) -> str | None:
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old" / "accepted.json").write_text('{"at": 5}')
        (tmp_path / "old" / "ended.json").write_text(json.dumps({"at": time.time(), **ended}))
        return switching._displaced(NEW)

    return found


def test_a_clock_that_jumps_hides_nothing(displaced: Recorded) -> None:
    for jump in (-86400.0, 0.0, 86400.0):
        assert displaced(at=time.time() + jump, since_boot=[boot_id(), 998.5]) == "old"


def test_what_ended_long_before_or_in_another_boot_was_not_displaced(displaced: Recorded) -> None:
    assert displaced(since_boot=[boot_id(), 900.0]) is None
    assert displaced(since_boot=["another boot", 998.5]) is None
    assert displaced() is None
