"""Which process of an engine ended first. The death of a worker reaches the log as another one's broken connection."""

import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rigctl.supervisor.ended import KILLED, command

# SGLang 0.5.16 ends 5 s after a process of its own, vLLM at once; a collective may wait for its peer before that.
BEFORE_SECONDS = 60.0
_EXIT_CODE = 49  # of stat(5), counted from the state; a zombie's is readable to its own user


class Deaths:
    """Learns of the end of processes that are not our children, on a thread of its own."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._followed: dict[int, int] = {}  # descriptor (pidfd_open(2)) -> its pid
        self._names: dict[int, str] = {}
        self._ended: list[tuple[float, int, int | None]] = []
        self._serving: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def follow(self, pids: Iterable[int]) -> None:
        """Look after these processes too. Their names are read again: a worker names itself after its start."""
        ended = {pid for _, pid, _ in self._ended}  # dead, but its parent has not taken note
        for pid in (pid for pid in pids if pid not in ended):
            with suppress(OSError):  # it is gone already
                if pid not in [*self._followed.values()]:
                    descriptor = os.pidfd_open(pid)
                    self._followed[descriptor] = pid
                    self._poll.register(descriptor, select.EPOLLIN)
                self._names[pid] = command(pid)

    def begin_service(self) -> None:
        """Forget who has ended so far: a load has helpers that come and go, service has none."""
        self._serving = time.monotonic()

    def first(self, main: int) -> str | None:
        """The first process that failed shortly before now, in words; None when it was `main`, or none is known.

        One whose parent took note of its end before us counts only in service: how it ended is not known.
        """
        since = max(self._serving or 0.0, time.monotonic() - BEFORE_SECONDS)
        for at, pid, status in self._ended:
            if at >= since and pid == main:
                return None
            if at >= since and status != 0 and (status is not None or self._serving):
                how = f": {exit_text(status)}" if status is not None else ""
                return f"process {pid} {self._names.get(pid, '')} had ended{how}"
        return None

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                pid = self._followed.pop(descriptor)
                self._ended.append((time.monotonic(), pid, _status(pid)))
                # A fork in between may hold the descriptor open a little longer: closing it would not end the wait.
                self._poll.unregister(descriptor)
                os.close(descriptor)


def _status(pid: int) -> int | None:
    """How a process ended, as subprocess has it; None when its parent has taken note already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if fields[0] in "ZX" else None
    except (OSError, ValueError, IndexError):
        return None


def exit_text(status: int) -> str:
    """An exit code or a signal, in words."""
    if status == -signal.SIGKILL:
        return f"signal SIGKILL: {KILLED}"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name of its own
        return f"signal {-status}"
