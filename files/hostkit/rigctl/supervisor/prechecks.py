"""What must hold before an engine is started. Each check raises RigctlError, or says what it found in a few words."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rigctl.checkpoints import headers, precheck
from rigctl.engines import patches
from rigctl.errors import RigctlError
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor import live_settings
from rigctl.supervisor.activity import gpu_memory
from rigctl.supervisor.specification import Specification


def run_all(specification: Specification) -> Iterator[tuple[str, str]]:
    """Run every check; name and outcome. Raises RigctlError with the first that does not hold."""
    for name, check in CHECKS.items():
        try:
            yield name, check(specification)
        except RigctlError as error:
            raise RigctlError(f"pre-check {name}: {error}") from None


def _weights(directory: Path, what: str) -> str:
    """Its files are there, whole by their own headers."""
    if not directory.is_dir():
        raise RigctlError(f"{what} is missing: {directory} is no directory; deploy again to stage it")
    if partial := sorted(directory.glob("*.incomplete")):
        raise RigctlError(f"{what} is half downloaded: {partial[0]}; deploy again to finish it")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise RigctlError(f"{what} has no weights: no *.safetensors in {directory}; stage it again")
    try:
        for path in files:
            headers.read(path)
    except (OSError, headers.BadFile) as error:
        raise RigctlError(f"{what} in {directory} is damaged: {error}; stage it again") from None
    return f"{len(files)} weight files are whole by their headers"


def _drafter(specification: Specification) -> str:
    place = specification.drafter_path
    return _weights(Path(place), "the drafter") if place is not None else "none configured"


def port_free(specification: Specification) -> str:
    """Nobody listens where the engine will."""
    endpoint = specification.endpoint
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way, socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            way.connect((endpoint.host, endpoint.port))  # sends nothing
        except OSError as error:
            raise RigctlError(
                f"{endpoint.address} cannot be reached from here: {error.strerror}. Of a unit with a network of its own"
                " systemd could not bring up the loopback, for which it needs CAP_NET_ADMIN"
            ) from None
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError as error:
            raise RigctlError(
                f"{endpoint.address} cannot be listened on: {error.strerror}; `rigctl free` names who holds it"
            ) from None
    return f"{endpoint.address} is free"


def gpus_free(specification: Specification) -> str:
    """The claimed GPUs hold nothing, waited for while a previous owner's memory is being given back."""
    limits = specification.limits
    if not specification.gpus:
        return "none claimed"
    end = time.monotonic() + limits.gpu_wait_seconds
    while True:
        memory = gpu_memory(specification.gpus)
        if missing := sorted(set(specification.gpus) - memory.keys()):
            raise RigctlError(f"GPU {', '.join(map(str, missing))}: nvidia-smi does not show it; see `nvidia-smi`")
        busy = {index: used for index, used in memory.items() if used > limits.gpu_free_mib}
        if not busy:
            return f"{len(memory)} are free"
        if time.monotonic() > end:
            held = ", ".join(f"GPU {index} {used} MiB" for index, used in busy.items())
            pids = ", ".join(row[0] for row in nvidia_smi("--query-compute-apps=pid")) or "no process it knows"
            raise RigctlError(f"still in use: {held}, by {pids}; `rigctl free` names owner and command")
        time.sleep(0.5)


def shared_memory(specification: Specification) -> str:
    """There is room in /dev/shm (this unit's own)."""
    return _room("/dev/shm", specification.limits.minimum_shm_mib)  # noqa: S108  # looked at, not written


def disk(specification: Specification) -> str:
    """There is room for the engine's caches and logs."""
    places = [os.environ.get("CACHE_DIRECTORY"), os.environ.get("LOGS_DIRECTORY")]
    return (
        "; ".join(_room(place, specification.limits.minimum_disk_mib) for place in places if place) or "not in a unit"
    )


def _room(place: str, minimum_mib: int) -> str:
    free = shutil.disk_usage(place).free >> 20
    if free < minimum_mib:
        raise RigctlError(f"{place} has {free} MiB free, {minimum_mib} are needed; make room and start again")
    return f"{place} has {free} MiB free"


CHECKS: dict[str, Callable[[Specification], str]] = {
    "target": lambda specification: _weights(Path(specification.target_path), "the model"),
    "drafter": _drafter,
    "port": port_free,
    "GPUs": gpus_free,
    "shared memory": shared_memory,
    "disk": disk,
    "checkpoints published": precheck.published,
    "drafter fits": precheck.fits,
    "remote code": precheck.trusted_code,
    "patches in place": patches.precheck,
    "host settings live": live_settings.precheck,
}
"""In the order in which they run: what is quick and often the cause comes first."""
