"""Is an engine that says nothing still at work? Processor time, I/O and GPU memory of the unit's processes tell.

February's loads were declared dead twice while they were alive; a hung collective, on the other hand, spins at full
speed. So lines, I/O and GPU memory are proof of progress, and processor time alone is believed for a limited time.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rigctl.contract.limits import Limits
from rigctl.nvidia_smi import nvidia_smi

# cgroups(7): hierarchy:controllers:path; systemd puts a unit's processes into a group of the unit's name.
IN_UNIT = re.compile(r"/kimi-[^/\n]*\.service$", re.MULTILINE)


def members(main: int | None = None) -> list[int]:
    """The rest of a main process's serving unit: the engine with all its descendants, re-parented or not.

    main: this process, unless given. Outside a serving unit none: such a control group is not ours.
    """
    main = main or os.getpid()
    mine = control_groups(main)
    if mine is None or not IN_UNIT.search(mine):
        return []
    return [pid for pid in psutil.pids() if pid != main and control_groups(pid) == mine]


def engine_processes(main: int | None = None) -> list[int]:
    """Processes that may get the API key of the unit with this main process; outside a unit its descendants."""
    with suppress(psutil.Error):
        return members(main) or [child.pid for child in psutil.Process(main).children(recursive=True)]
    return []


def control_groups(pid: int) -> str | None:
    """A process's control groups (cgroups(7)); None when it is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
    except OSError:
        return None


@dataclass(frozen=True)
class Activity:
    """What processes have used so far, by pid: (processor seconds, bytes read and written); and GPU memory in MiB."""

    used: Mapping[int, tuple[float, int]]
    gpu_mib: int | None = None

    def since(self, before: "Activity") -> tuple[float, int]:
        """Processor seconds and bytes since `before`; a process that is gone by now counts nothing."""
        cpu, moved = 0.0, 0
        for pid, (seconds, size) in self.used.items():
            earlier = before.used.get(pid, (0.0, 0))
            cpu += max(0.0, seconds - earlier[0])
            moved += max(0, size - earlier[1])
        return cpu, moved


def measure(pids: Sequence[int], gpus: Sequence[int]) -> Activity:
    """Read the activity of `pids` now."""
    used: dict[int, tuple[float, int]] = {}
    for pid in pids:
        # Gone, or another user's. RuntimeError: it ended between two readings, and its file is empty.
        with suppress(psutil.Error, RuntimeError, ValueError):
            process = psutil.Process(pid)
            cpu, io = process.cpu_times(), process.io_counters()
            # read_bytes has what a mapped file was paged in, read_chars what came from the page cache.
            used[pid] = (cpu.user + cpu.system, io.read_chars + io.write_chars + io.read_bytes)
    memory = gpu_memory(gpus)
    return Activity(used, sum(memory.values()) if memory else None)


def gpu_memory(gpus: Sequence[int]) -> dict[int, int]:
    """MiB in use on each of `gpus`; empty where no GPU is claimed or nvidia-smi does not answer."""
    if not gpus:
        return {}
    rows = nvidia_smi("--query-gpu=index,memory.used")
    return {int(row[0]): int(row[1]) for row in rows if row[1].isdigit() and int(row[0]) in gpus}


class Patience:
    """Decides when a load has stopped making progress. Times in seconds of a clock that no one can set."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._proof = self._life = clock()
        self._news = 0
        self._last: tuple[float, Activity] | None = None

    def heard(self, news: int) -> None:
        """The engine's log has brought `news` new things so far."""
        if news != self._news:
            self._news = news
            self._proof = self._life = self._clock()

    def observe(self, activity: Activity) -> None:
        """One sample of what the engine's processes have used."""
        now = self._clock()
        if self._last is not None:
            then, before = self._last
            cpu, moved = activity.since(before)
            gpu = abs((activity.gpu_mib or 0) - (before.gpu_mib or 0))
            if moved >= self._limits.io_mib * 2**20 or gpu >= self._limits.gpu_step_mib:
                self._proof = self._life = now
            elif cpu >= self._limits.busy_share * (now - then):
                self._life = now
        self._last = (now, activity)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last proof of progress."""
        return self._clock() - self._proof

    def verdict(self) -> str | None:
        """Why the load counts as stuck; None while it does not."""
        now = self._clock()
        for since, minutes, what in (
            (self._life, self._limits.no_progress_minutes, "no new log line, no processor time, I/O or GPU memory"),
            (self._proof, self._limits.busy_only_minutes, "processor time, but no new log line, I/O or GPU memory"),
        ):
            if now - since > minutes * 60:
                return f"no progress for {minutes:g} min: {what}"
        return None
