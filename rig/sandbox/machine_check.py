"""Whether this computer can run `make demo`: asked before anything is installed, so standard library only.

Exit code 0, or 1 with every reason at once. The deploy to a real host needs none of this but Python.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

GB = 1_000_000_000
LEAST_MEMORY = 5.5 * GB  # a machine sold with 6 GB; the tiny vLLM and the build of its environment take 4
LEAST_DISK = 8 * GB


def memory_bytes(meminfo: str) -> int:
    """MemTotal of /proc/meminfo, in bytes; 0 when it is not there."""
    found = [line.split()[1] for line in meminfo.splitlines() if line.startswith("MemTotal:")]
    return int(found[0]) * 1024 if found else 0


@dataclass(frozen=True)
class Computer:
    """What is checked. memory, disk: bytes; disk is what is free where boxes lie."""

    system: str
    machine: str
    euid: int
    memory: int
    disk: int
    has_apt: bool
    has_box: bool
    python: tuple[int, ...] = (3, 11)


def reasons(computer: Computer) -> list[str]:
    """Why a machine cannot have the box, each with what would help. Empty: it can."""
    if computer.system != "Linux":
        return [f"this is {computer.system}: the box needs Linux on x86-64; use a Linux machine or VM (or `make tour`)"]
    found = []
    if computer.python < (3, 11):
        found.append(
            f"python3 is {'.'.join(map(str, computer.python))}: kimi-rig needs 3.11 (make PYTHON=python3.11 ...)"
        )
    if computer.machine not in ("x86_64", "amd64"):
        found.append(
            f"the processor is {computer.machine}: engines are built for x86-64 only; use such a machine or VM"
        )
    if computer.euid != 0:
        found.append("you are not root: systemd-nspawn needs root; run the same command with sudo")
    if computer.memory < LEAST_MEMORY:
        found.append(f"{computer.memory / GB:.1f} GB of memory: the box and its engine need 6 GB")
    if computer.disk < LEAST_DISK:
        found.append(
            f"{computer.disk / GB:.1f} GB free on the disk of the boxes: 8 GB are needed; free some, or set "
            "KIMI_RIG_SANDBOX_DIR to a directory on a larger disk"
        )
    if not computer.has_apt and not computer.has_box:
        found.append("neither systemd-nspawn nor apt-get is here: use Debian or Ubuntu, or install systemd-container")
    return found


def existing(path: Path) -> Path:
    """The nearest directory that exists, from `path` upwards."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def main() -> int:
    """Check this computer."""
    meminfo = Path("/proc/meminfo")
    boxes = Path(os.environ.get("KIMI_RIG_SANDBOX_DIR") or Path(__file__).parents[2] / ".sandbox").absolute()
    built = (boxes / "sandbox" / "built.json").exists()
    computer = Computer(
        platform.system(),
        platform.machine(),
        os.geteuid(),
        memory_bytes(meminfo.read_text()) if meminfo.exists() else 0,
        shutil.disk_usage(existing(boxes)).free if not built else LEAST_DISK,
        has_apt=shutil.which("apt-get") is not None,
        has_box=shutil.which("systemd-nspawn") is not None,
        python=sys.version_info[:2],
    )
    found = reasons(computer)
    for reason in found:
        print(f"this machine cannot run the sandbox: {reason}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
