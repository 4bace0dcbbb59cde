"""What a person sees of long work: a line a phase, what moves, the words of what failed, a log with all."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from rig.cli import progress
from rig.cli.progress import Progress
from rigctl.contract.foreign import Gate

DEPLOY = """--> Connecting to hosts...
--> Starting operation: Base | Hold the deploy lock
    [one] No changes
--> Starting operation: Base | Install packages
[one] \x1b[2Jnoise
    [one] Success
--> Starting operation: Engines | Build the environment of e
    [one] Engines | Build the environment of e: 15 s: 43 %, 12 MB/s, 20 s left
    [one] Success
"""
FAILS = """--> Starting operation: Base | Install packages
[one] E: no space left
    [one] Error: executed 1 commands
--> Starting operation: Base | Make directories
    [two] Success
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def child(text: str, code: int = 0, pause: float = 0.0) -> list[str]:
    program = f"import sys, time\nfor line in {text.splitlines()!r}: print(line, flush=True); time.sleep({pause})"
    return [sys.executable, "-c", f"{program}\nsys.exit({code})"]


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(progress, "ROOT", tmp_path)
    monkeypatch.setattr(progress, "LOGS", tmp_path / ".log")
    monkeypatch.setattr(progress, "SHORT_SECONDS", 0.0)
    return tmp_path / ".log"


def test_a_line_a_stage_and_all_in_the_log(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("x")
    assert shown.follow(child(DEPLOY)) == 0
    shown.end()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["details:", "Base", "Engines"]
    assert all(line.split()[1:] == ["0", "s"] for line in lines[1:])
    log = (logs / "x.log").read_text()
    assert "43 %" in log and "\\x1b[2Jnoise" in log, "words of a host are only shown"


def test_a_long_phase_says_sometimes_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SPARSE_SECONDS", 0.0)
    Progress("x").follow(child(DEPLOY))
    assert "43 %, 12 MB/s, 20 s left" in capsys.readouterr().out


def test_on_a_terminal_one_line_moves_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    below = Terminal()
    monkeypatch.setattr(sys, "stdout", Gate(below))
    monkeypatch.setenv("COLUMNS", "60")
    shown = Progress("x")
    shown.follow(child(DEPLOY, pause=0.01))
    shown.end()
    text = below.getvalue()
    *moved, last = text.split("\r")
    assert any("43 %, 12 MB/s" in one for one in moved) and last.startswith("\x1b[KEngines") and last.endswith(" s\n")
    assert all(len(one.partition("\x1b[K")[0].rpartition("\n")[2]) < 60 for one in moved)
    assert "\x1b" not in text.replace("\x1b[K", "")


def test_what_failed_is_shown_in_its_own_words(logs: Path) -> None:
    shown = Progress("x")
    assert shown.follow(child(FAILS, 1)) == 1
    trouble = shown.trouble()
    assert "E: no space left" in trouble and trouble.endswith("all of it: .log/x.log")
    assert "Connecting" not in trouble


def test_verbose_prints_what_the_log_has(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("x", verbose=True)
    shown.follow(child("--> Starting operation: Base | Install packages\n    [one] Success\n"))
    said = capsys.readouterr().out
    assert (logs / "x.log").read_text() in said


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    shown = Progress("x")
    monkeypatch.setattr(shown, "_listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shown.follow([sys.executable, "-c", "import time; time.sleep(600)"])
