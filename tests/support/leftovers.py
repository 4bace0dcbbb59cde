"""No process and no box outlives its test, also when the run is killed by SIGKILL.

Children inherit a mark in their environment. What still has a test's mark at its end is killed. A watcher outside the
run holds the reading end of a pipe that only the run can write: however the run ends, the watcher then kills what has
the run's mark, and runs the commands that the run has left for its end. Standard library only: the watcher starts
with every run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

MARK = "KIMI_RIG_TEST_RUN"
"""Environment variable: the run, and for children of a test also the test."""


def kill(mark: str, *, whole_run: bool = False) -> list[str]:
    """Kill every process with this mark but ourselves; their command lines. whole_run: those of its tests too."""
    wanted = f"{MARK}={mark}".encode()
    killed: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        # Gone, another user's, or a kernel thread. The descriptor keeps a number that is used again from being hit.
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                found = (process / "environ").read_bytes().split(b"\0")
                if pid != os.getpid() and any(
                    one == wanted or (whole_run and one.startswith(wanted + b"/")) for one in found
                ):
                    line = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    select.select([descriptor], [], [], 5)  # readable once it has ended
                    killed.append(f"{pid} {line[:120]}")
            finally:
                os.close(descriptor)
    return killed


class Watcher:
    """The process that clears up after a run."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as end:
            # A session of its own: what is sent to the run's process group does not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, self.mark], stdin=end, env=environment, start_new_session=True
            )
        self._pipe: IO[str] = os.fdopen(writer, "w")
        os.environ[MARK] = self.mark

    def end(self) -> None:
        """The run has ended: wait until the watcher has cleared up."""
        self._pipe.close()
        self._process.wait()

    @contextmanager
    def afterwards(self, command: Sequence[str], **environment: str) -> Iterator[None]:
        """If the block is not left normally, by an error or by the run's end, the watcher runs this command."""
        task = json.dumps({"command": list(command), "environment": environment, "directory": str(Path.cwd())})
        print(task, file=self._pipe, flush=True)
        yield
        print(task, file=self._pipe, flush=True)


@contextmanager
def marked(test: int) -> Iterator[None]:
    """Children that are started in the block do not outlive it."""
    run = os.environ.get(MARK, "").partition("/")[0]
    mark = f"{run}/{os.getpid()}.{test}"
    os.environ[MARK] = mark
    try:
        yield
    finally:
        os.environ[MARK] = run
        kill(mark)


def watch(mark: str, lines: IO[str]) -> None:
    """What the watcher does: a line that comes twice takes its command back."""
    tasks: list[str] = []
    for line in lines:
        if line in tasks:
            tasks.remove(line)
        else:
            tasks.append(line)
    while kill(mark, whole_run=True):  # what was starting another process meanwhile
        pass
    for line in tasks:
        task = json.loads(line)
        environment = {**os.environ, **task["environment"]}
        subprocess.run(task["command"], cwd=task["directory"], env=environment, stdin=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1], sys.stdin)
