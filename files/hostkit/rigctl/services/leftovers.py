"""`rigctl free`: who holds GPUs, ports and shared memory outside our units, and an end to it on demand.

Engines started by hand leave workers that re-parent to PID 1 and keep 100 GB of GPU memory and the port (sglang#23627,
vllm#55510), and segments that fill /dev/shm (sglang#40723).
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rigctl.errors import RigctlError
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor.activity import IN_UNIT, PROC
from rigctl.supervisor.ended import command
from rigctl.supervisor.specification import installed

SHM = Path("/dev/shm")  # noqa: S108  # the segments' place, not a temporary file
ENGINE = re.compile(r"sglang[.:]|vllm[. ]|VLLM::|sgl_diffusion|/vllm\b")
# The last two: left behind by SGLang 0.5.16 at every stop.
SEGMENTS = ("sgl_shm_*", "psm_*", "sem.mp-*", "nccl-*", "torch_*", "vllm*", "sglang_loads_*.shm", "sem.loky-*")


@dataclass(frozen=True)
class Holder:
    """A process outside our units. holds: what keeps others from starting."""

    pid: int
    owner: str
    command: str
    holds: list[str]
    engine: bool


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("free", help="name who holds GPUs, ports and shared memory outside our units")
    parser.add_argument("--yes", action="store_true", help="end those processes and remove segments nobody uses")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Report, and with --yes clear. Exit code 0 when nothing is (any more) in the way, else 1."""
    if os.geteuid() != 0:
        raise RigctlError("only root sees and ends other users' processes; use sudo")
    found = holders()
    segments = unused_segments()
    if arguments.yes:
        end([holder.pid for holder in found if holder.engine])
        for segment in segments:
            segment.unlink(missing_ok=True)
        _tell(found, segments, arguments.json, did=True)
        found, segments = holders(), unused_segments()
        return 1 if found or segments else 0
    _tell(found, segments, arguments.json, did=False)
    return 1 if found or segments else 0


def _tell(found: list[Holder], segments: list[Path], as_json: bool, *, did: bool) -> None:
    if as_json:
        print(json.dumps({"processes": [asdict(h) for h in found], "segments": list(map(str, segments)), "ended": did}))
        return
    for holder in found:
        verb = "ended" if did and holder.engine else "left alone (no engine)" if did else "holds"
        print(f"{verb:<8} {holder.pid:>7} {holder.owner:<10} {', '.join(holder.holds)}: {holder.command}")
    for segment in segments:
        print(f"{'removed' if did else 'unused':<8} {segment}")
    if not found and not segments:
        print("nothing outside the serving units holds GPUs, ports or shared memory")
    elif not did:
        print("`rigctl free --yes` ends the engines among them and removes the unused segments")


def holders(proc: Path = PROC) -> list[Holder]:
    """Processes outside our units that hold a GPU or a configured port, or look like an engine."""
    gpu = {int(row[0]): f"GPU memory {row[1]} MiB" for row in nvidia_smi("--query-compute-apps=pid,used_memory")}
    ports = _port_holders({endpoint.port for one in installed() for endpoint in one.endpoints}, proc)
    found = []
    for entry in sorted(proc.iterdir(), key=lambda path: path.name):
        if not entry.name.isdigit() or int(entry.name) == os.getpid() or _in_our_unit(entry):
            continue
        pid, line = int(entry.name), command(int(entry.name), proc)
        if line == "(gone)":
            continue
        engine = bool(ENGINE.search(line)) and "rigctl" not in line
        holds = [*([gpu[pid]] if pid in gpu else []), *(f"port {port}" for port in ports.get(pid, []))]
        if holds or engine:
            holds = holds or ["an engine outside the units"]
            found.append(Holder(pid, _owner(entry), line, holds, engine or pid in gpu))
    return found


def _in_our_unit(process: Path) -> bool:
    try:
        return bool(IN_UNIT.search((process / "cgroup").read_text()))
    except OSError:
        return True  # gone


def _owner(process: Path) -> str:
    try:
        uid = process.stat().st_uid
        return pwd.getpwuid(uid).pw_name
    except OSError:
        return "?"
    except KeyError:
        return str(uid)


def _port_holders(ports: set[int], proc: Path) -> dict[int, list[int]]:
    """pid -> ports it listens on, of `ports`."""
    inodes: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == "0A" and port in ports:  # TCP_LISTEN
                    inodes[f"socket:[{fields[9]}]"] = port
    holding: dict[int, list[int]] = {}
    for link in proc.glob("[0-9]*/fd/*") if inodes else ():
        with suppress(OSError):
            port_of = inodes.get(str(link.readlink()))
            if port_of is not None and port_of not in holding.setdefault(int(link.parts[-3]), []):
                holding[int(link.parts[-3])].append(port_of)
    return {pid: found for pid, found in holding.items() if found}


def unused_segments(directory: Path = SHM, proc: Path = PROC) -> list[Path]:
    """Engines' shared memory segments that no process has mapped or open."""
    segments = {path for pattern in SEGMENTS for path in directory.glob(pattern)}
    if not segments:
        return []
    used: set[str] = set()
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            used |= set(re.findall(rf"({re.escape(str(directory))}/\S+)", (process / "maps").read_text()))
        for link in process.glob("fd/*"):
            with suppress(OSError):
                used.add(str(link.readlink()))
    return sorted(path for path in segments if str(path) not in used)


def end(pids: Iterable[int]) -> None:
    """End processes: asked first, then killed after ten seconds."""
    left = list(pids)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        limit = time.monotonic() + 10
        while (left := [pid for pid in left if _runs(pid)]) and time.monotonic() < limit:
            time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
