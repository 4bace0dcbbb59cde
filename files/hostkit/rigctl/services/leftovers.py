"""`rigctl free`: who holds GPUs, ports and shared memory outside our units, and an end to it on demand.

Engines started by hand leave workers that re-parent to PID 1 and keep 100 GB of GPU memory and the port (sglang#23627,
vllm#55510), and segments that fill /dev/shm (sglang#40723).
"""

import argparse
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor.activity import IN_UNIT, control_groups
from rigctl.supervisor.ended import command
from rigctl.supervisor.specification import installed

SHM = Path("/dev/shm")  # noqa: S108  # the segments' place, not a temporary file
# What a process executes, never words of its command line: an editor that has a file of vLLM open is no engine.
CODE = re.compile(r"/(?:site|dist)-packages/(?:vllm|sglang|sgl_kernel|sgl_diffusion)/[^\n]*\.so")
TITLE = re.compile(r"(?:VLLM|sglang|sgl_diffusion)::")
"""How engines name their workers, in a name that the kernel keeps (prctl(2), PR_SET_NAME)."""
PROGRAM = re.compile(r"(?:python[\d.]*|vllm|sglang)$")
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


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("free", help="name who holds GPUs, ports and shared memory outside our units")
    parser.add_argument("--yes", action="store_true", help="end those processes and remove segments nobody uses")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Report, and with --yes clear. Exit code 0 when nothing is (any more) in the way, else 1."""
    if os.geteuid() != 0:
        raise RigctlError("only root sees and ends other users' processes; use sudo")
    found, segments = holders(), unused_segments()
    if arguments.yes:
        end([holder.pid for holder in found if holder.engine])
        Place(str(SHM)).remove(*(segment.name for segment in segments))
    _tell(found, segments, arguments.json, did=arguments.yes)
    left = [*holders(), *unused_segments()] if arguments.yes else [*found, *segments]
    return 1 if left else 0


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


def holders() -> list[Holder]:
    """Processes outside our units that hold a GPU or a configured port, or run an engine's code."""
    gpu = {int(row[0]): f"GPU memory {row[1]} MiB" for row in nvidia_smi("--query-compute-apps=pid,used_memory")}
    ports = {endpoint.port for one in installed() for endpoint in one.endpoints}
    found = []
    for process in psutil.process_iter(["username"]):
        pid, line, groups = process.pid, command(process.pid), control_groups(process.pid)
        if pid == os.getpid() or line == "(gone)" or groups is None or IN_UNIT.search(groups):
            continue
        engine = runs_engine(process)
        holds = [*([gpu[pid]] if pid in gpu else []), *_ports_held(process, ports)]
        if holds or engine:
            holds = holds or ["an engine outside the units"]
            found.append(Holder(pid, process.info["username"] or "?", line, holds, engine or pid in gpu))
    return found


def runs_engine(process: psutil.Process) -> bool:
    """Whether its program is an engine: a Python that has loaded one's libraries, or has the name of a worker."""
    with suppress(psutil.Error, OSError):  # gone, or a thread of the kernel
        if PROGRAM.search(process.exe().removesuffix(" (deleted)")):
            return bool(
                TITLE.match(process.name())
                or CODE.search(Path(f"/proc/{process.pid}/maps").read_text(errors="replace"))
            )
    return False


def _ports_held(process: psutil.Process, ports: set[int]) -> list[str]:
    """What it has of these TCP ports: it listens on one, or an outgoing connection was given it (sglang#37215).

    Asked of each process: several may share one socket.
    """
    try:
        held = [one for one in process.net_connections("tcp") if one.laddr and one.laddr.port in ports]
    except psutil.Error:
        return []
    listens = {one.laddr.port for one in held if one.status == psutil.CONN_LISTEN}
    local = sorted({one.laddr.port for one in held})
    return [f"port {port}" if port in listens else f"port {port} of a connection" for port in local]


def unused_segments(directory: Path = SHM, proc: Path = Path("/proc")) -> list[Path]:
    """Engines' shared memory segments that no process has mapped or open."""
    segments = {path for pattern in SEGMENTS for path in directory.glob(pattern) if not path.is_dir()}
    if not segments:
        return []
    used: set[str] = set()
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # a process may end at any of these
            maps = (process / "maps").read_text(errors="replace")
            used |= set(re.findall(rf"({re.escape(str(directory))}/\S+)", maps))
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(str(link.readlink()))
    return sorted(path for path in segments if str(path) not in used)


def end(pids: Iterable[int]) -> None:
    """End processes: asked first, then killed after ten seconds."""
    left = [process for process in psutil.process_iter() if process.pid in set(pids)]
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                ask(process)
        _, left = psutil.wait_procs(left, timeout=10)
