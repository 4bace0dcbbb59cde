"""`rigctl logs`: the journal of a configuration, or the file of one of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from rigctl.cli import main
from rigctl.services import switching
from tests.unit.serving import specification


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is called for `rigctl logs`, with the log files of two runs there."""
    made: list[list[str]] = []
    for day in (1, 2):
        (tmp_path / f"2026-01-0{day}T00-00-00-1.log").write_text(f"day {day}\n")
    monkeypatch.setenv("LOGS_DIRECTORY", str(tmp_path))
    wanted = specification()
    monkeypatch.setattr(switching, "named", lambda _name: wanted)
    monkeypatch.setattr(switching, "active", lambda: wanted)

    def call(command: list[str], stdin: BinaryIO | None = None) -> int:
        made.append([*command, stdin.read().decode()] if stdin else command)
        return 0

    monkeypatch.setattr(switching, "_shown", call)
    return made


def test_the_journal(calls: list[list[str]]) -> None:
    assert main(["logs"]) == main(["logs", "x", "-f"]) == 0
    assert [call[0] for call in calls] == ["journalctl", "journalctl"]
    assert "--no-pager" in calls[0] and "-f" in calls[1]


def test_the_file_of_a_run(calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "x", "--run", "1"]) == main(["logs", "x", "--run", "2"]) == 0
    assert [call[-1] for call in calls] == ["day 2\n", "day 1\n"]
    assert main(["logs", "x", "--run", "3"]) == 1
    assert "has 2 runs; --run takes 1 (the last) to 2" in capsys.readouterr().err
