"""Memory that is left on this host and in this control group, and what processes hold. All in MiB."""

import os
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# cgroup v1 says "no limit" by a number near the greatest there is.
_UNLIMITED = 1 << 60


def available(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What may still be taken: of the host (MemAvailable, proc(5)) and of every control group we are in."""
    lines = (proc / "meminfo").read_text().splitlines()
    host = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([host, *(limit - used for limit, used in limits(proc, cgroups))])


def budget(limit: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What a build may take as a whole. limit: as systemd's MemoryMax= has it, "85%" of the host's, "12G" or "900M"."""
    lines = (proc / "meminfo").read_text().splitlines()
    host = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemTotal:"))
    number, unit = int(limit[:-1]), limit[-1]
    stated = host * number // 100 if unit == "%" else number * {"M": 1, "G": 1024}[unit]
    return min([host, stated, *(each for each, _ in limits(proc, cgroups))])


def limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[int, int]]:
    """Limit and use, without page cache, of each control group above us that has a limit; v1 and v2."""
    for group, limit, usage, cache in _groups(proc, cgroups):
        try:
            text = (group / limit).read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                continue
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - sum(int(statistics.get(key, 0)) for key in cache)
        except (OSError, ValueError):
            continue
        yield int(text) // MIB, max(0, used) // MIB


def killed(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Processes that the kernel has killed so far because our own control group had no memory left."""
    for group, *_ in _groups(proc, cgroups):
        for name in ("memory.events", "memory.oom_control"):
            try:
                counts = dict(line.split() for line in (group / name).read_text().splitlines())
            except (OSError, ValueError):
                continue
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Ours and those above it: directory, names of limit and use, and what of the use is page cache."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = cgroups, ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            top = cgroups / "memory"
            cache = ("total_inactive_file", "total_active_file")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", cache)
        else:
            continue
        group = top / path.strip("/")
        while group != top.parent:
            yield group, *names
            group = group.parent


def of_tree(pid: int, proc: Path = PROC) -> int:
    """Resident memory of a process and its descendants."""
    total, pending = 0, [pid]
    while pending:
        each = proc / str(pending.pop())
        try:
            total += int((each / "statm").read_text().split()[1]) * _PAGE
            for task in (each / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total // MIB
