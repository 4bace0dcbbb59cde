"""What must hold before an engine is started. Each check is a function that raises RigctlError; more can be registered.

A check returns what it found in a few words. One whose module is not installed is listed as absent, never as passed.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor.activity import gpu_memory
from rigctl.supervisor.specification import Specification

Check = Callable[[Specification], str]

# Name of the check -> module[:function] with `precheck(specification) -> str`, which raises RigctlError when it does
# not hold.
REGISTERED: dict[str, str] = {
    "checkpoints published": "rigctl.checkpoints.precheck:published",
    "drafter fits": "rigctl.checkpoints.precheck:fits",
    "remote code": "rigctl.checkpoints.precheck:trusted_code",
    "patches in place": "rigctl.engines.patches",
    "host settings live": "rigctl.supervisor.live_settings",
}
ABSENT = "absent"
WARNING = "warning: "
"""How the outcome of a check begins that holds, and yet found what `rigctl status` should show."""


def checks() -> dict[str, Check | None]:
    """All checks by name, in order; None where the module is not part of this rigctl."""
    found: dict[str, Check | None] = {
        "target": target,
        "drafter": drafter,
        "port": port_free,
        "GPUs": gpus_free,
        "shared memory": shared_memory,
        "disk": disk,
    }
    for name, module in REGISTERED.items():
        found[name] = _external(module)
    return found


def _external(entry: str) -> Check | None:
    module, _, function = entry.partition(":")
    try:
        check: Check = getattr(importlib.import_module(module), function or "precheck")
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise
    return check


def run_all(specification: Specification) -> Iterator[tuple[str, str]]:
    """Run every check; name and outcome. Raises RigctlError with the first that does not hold."""
    for name, check in checks().items():
        if check is None:
            yield name, ABSENT
            continue
        try:
            yield name, check(specification)
        except RigctlError as error:
            raise RigctlError(f"pre-check {name}: {error}") from None


def target(specification: Specification) -> str:
    """The model's files are there, whole by their own headers."""
    files = _weights(Path(specification.target_path), "the model")
    return f"{len(files)} weight files are whole by their headers"


def drafter(specification: Specification) -> str:
    """The drafter's files are there, whole by their own headers."""
    if specification.drafter_path is None:
        return "none configured"
    files = _weights(Path(specification.drafter_path), "the drafter")
    return f"{len(files)} weight files are whole by their headers"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RigctlError(f"{path}: {error.strerror}; deploy again to stage the checkpoint") from None
    except (ValueError, RecursionError):
        raise RigctlError(f"{path} is no JSON: the checkpoint is damaged; stage it again") from None
    return found if isinstance(found, dict) else {}


def _weights(directory: Path, what: str) -> list[Path]:
    if not directory.is_dir():
        raise RigctlError(f"{what} is missing: {directory} is no directory; deploy again to stage it")
    _json(directory / "config.json")
    if partial := sorted(directory.glob("*.incomplete")):
        raise RigctlError(f"{what} is half downloaded: {partial[0]}; deploy again to finish it")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = _json(index).get("weight_map")
        names = list(listed.values()) if isinstance(listed, dict) else []
        files = sorted({directory / name for name in names if isinstance(name, str)})
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise RigctlError(f"{what} has no weights: no *.safetensors in {directory}; stage it again")
    for path in files:
        if problem := _damage(path):
            raise RigctlError(f"{what} is damaged: {path}: {problem}; stage it again")
    return files


def _damage(path: Path) -> str | None:
    """What is wrong with a safetensors file by its header (8 bytes of length, JSON with offsets); None if nothing."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                return f"{size} bytes, shorter than its header"
            header = json.loads(file.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return error.strerror or type(error).__name__
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its header cannot be read"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"{size} bytes, {whole} by its header"


def port_free(specification: Specification) -> str:
    """Nobody listens where the engine will."""
    endpoint = specification.endpoint
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
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
