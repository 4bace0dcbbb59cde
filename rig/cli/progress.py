"""What a person sees of long work: one line a phase with its seconds; on a terminal also what moves in it.

Elsewhere (a pipe, a file) a long phase says now and then where it is. Everything that a child says is in a log file.
"""

import os
import re
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import click

from rig.catalog.entries import ROOT
from rigctl.contract.foreign import Gate, gated

LOGS = ROOT / ".log"
SPARSE_SECONDS = 20.0
"""Between two lines of one phase where nothing can move."""
SHORT_SECONDS = 0.5
"""A stage of pyinfra that took less has no line of its own."""
OPERATION = re.compile(r"--> Starting operation: (?:(?P<stage>[^|]+) \| )?(?P<name>.*)")
JOB = re.compile(r"\[[^]]+\] .*: \d+ s: (?P<state>.*)")  # rig/operations/jobs.py

verbose = click.option("-v", "--verbose", is_flag=True, help="Also print every line of the log.")


class Progress:
    """The phases of one command; its children's output goes to the log .log/NAME.log, and is printed if verbose."""

    def __init__(self, name: str, *, verbose: bool = False) -> None:
        LOGS.mkdir(exist_ok=True)
        self.path = LOGS / f"{name}.log"
        self.path.unlink(missing_ok=True)  # another run may write to it still
        self.log = gated(self.path.open("w", encoding="utf-8", buffering=1))
        self.verbose = verbose
        self.terminal = sys.stdout if isinstance(sys.stdout, Gate) and sys.stdout.isatty() and not verbose else None
        self.title, self.begun, self.said, self.moves = "", 0.0, 0.0, ""
        self.block: deque[str] = deque(maxlen=25)
        """The last lines of the operation that runs, or ran last."""
        self.failed: list[str] = []
        """Those of operations that failed on a host while others went on."""
        print(f"details: {self.path.relative_to(ROOT)}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def begin(self, title: str) -> None:
        """The next phase."""
        self.title, self.begun, self.moves = title, time.monotonic(), ""
        self.said = self.begun
        self.tick()

    def end(self, outcome: str = "", least: float = 0.0) -> None:
        """The phase has ended well; it has a line if it took so many seconds."""
        if self.title and self.seconds >= least:
            self._print(outcome)
        self.title = ""

    def tick(self) -> None:
        """Show what moves: on a terminal in place, elsewhere now and then."""
        if self.terminal:
            self.terminal.show(self._line(self.moves) if self.title else "")
        elif self.title and time.monotonic() - self.said >= SPARSE_SECONDS:
            self._print(self.moves or "at work")

    def _line(self, text: str) -> str:
        return f"{self.title:<28}{self.seconds:>5.0f} s  {text}".rstrip()

    def _print(self, text: str) -> None:
        self.said = time.monotonic()
        if self.terminal:
            self.terminal.show("")
        print(self._line(text), flush=True)

    def follow(self, command: Sequence[str], *, plain: bool = False, **more: Any) -> int:
        """Run a child to its end; its exit code. Operations of pyinfra are phases, by stage.

        plain: every line says what moves. more: of Popen.
        """
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more) as child:
            try:
                self._listen(child.stdout.fileno() if child.stdout else -1, plain)
            except BaseException:
                child.kill()
                self.title = ""
                raise
            finally:
                self.tick()
        return child.returncode

    def _listen(self, pipe: int, plain: bool) -> None:
        rest = b""
        while True:
            if select.select([pipe], [], [], 1.0)[0]:
                read = os.read(pipe, 65536)
                *lines, rest = (rest + read).split(b"\n") if read else (rest, b"")
                for line in lines:
                    self._heard(line.decode("utf-8", "replace").rstrip(), plain)
                if not read:
                    return
            self.tick()

    def _heard(self, line: str, plain: bool) -> None:
        print(line, file=self.log)
        if self.verbose:
            print(line, flush=True)
        if operation := OPERATION.search(line):
            stage = (operation["stage"] or operation["name"]).strip()
            if stage != self.title:
                self.end(least=SHORT_SECONDS)
                self.begin(stage)
            self.moves = operation["name"].strip()
            self.failed += self.block if any("] Error" in one for one in self.block) else ()
            self.block.clear()
        elif plain:
            self.moves = line
        elif job := JOB.search(line):
            self.moves = job["state"]
        if line.strip():
            self.block.append(line)

    def trouble(self) -> str:
        """Where a child failed, in its own words, and where all of them are."""
        self.title = ""
        self.tick()
        return "\n".join([*self.failed, *self.block, f"all of it: {self.path.relative_to(ROOT)}"])
