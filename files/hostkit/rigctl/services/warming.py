"""`rigctl warm`: read the files of a configuration into the page cache while another one serves.

Reads at idle I/O priority, and only where memory has room beside what is there: the files of what serves stay cached,
since it would read them again after a crash.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rigctl.checkpoints.progress import Progress, Reporter, human_bytes
from rigctl.errors import RigctlError
from rigctl.page_cache import blocks, cached, files_below
from rigctl.services.systemd import properties
from rigctl.supervisor.specification import Specification, installed, named

RESERVE_SHARE = 0.05  # of the host's memory; for what engine and system take meanwhile
SAY_SECONDS = 5.0


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("warm", help="read a configuration's files into memory, for a faster start")
    parser.add_argument("name")
    parser.set_defaults(run=lambda arguments: warm(named(arguments.name)))


def warm(specification: Specification) -> int:
    """Read what is not in the page cache yet. Raises RigctlError when memory has no room for it, at once or later."""
    paths = files(specification)
    total = sum(path.stat().st_size for path in paths)
    missing = total - sum(map(cached, paths))
    room = psutil.virtual_memory().available - reserve(specification)
    if missing > room:
        raise RigctlError(
            f"{specification.name}: {human_bytes(missing)} of its {human_bytes(total)} are not in memory, and there is "
            f"room for {human_bytes(max(room, 0))} beside what serves: nothing is read"
        )
    process = psutil.Process()
    process.nice(19)
    process.ionice(psutil.IOPRIO_CLASS_IDLE)
    progress = Progress(specification.name, total=total, files_total=len(paths), phase="into memory")
    with _reported(progress):
        for path in paths:
            progress.file_starts(path.name, path.stat().st_size)
            for size in blocks(path):
                progress.advance(size)
                if psutil.virtual_memory().available < reserve_of_host():
                    raise RigctlError(f"{specification.name}: memory became short; the rest is not read")
            progress.file_ends(path.name, right=True)
    print(f"{specification.name}: {human_bytes(total)} are in memory")
    return 0


def files(specification: Specification) -> list[Path]:
    """The files of its checkpoints."""
    return files_below([specification.target_path, specification.drafter_path])


def reserve_of_host() -> int:
    """Bytes of memory that stay free in any case."""
    return int(psutil.virtual_memory().total * RESERVE_SHARE)


def reserve(specification: Specification) -> int:
    """Bytes that are not to be taken: the host's reserve, and cached files of other configurations that run."""
    mine = {*files(specification)}
    kept = {
        path
        for other in installed()
        if properties(other.unit, ["ActiveState"])["ActiveState"] in ("active", "activating")
        for path in files(other)
    }
    return reserve_of_host() + sum(cached(path) for path in kept - mine)


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="rigctl-warm-") as place,
        Reporter(progress, Path(place, "status.json"), as_json=False, every=SAY_SECONDS, out=sys.stdout),
    ):
        yield
