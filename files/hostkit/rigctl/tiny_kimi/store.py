"""Put a generated directory in its place: whole or not at all, never over something else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rigctl.errors import RigctlError


def publish(files: Mapping[str, bytes], destination: Path) -> bool:
    """Write a flat directory of world-readable files; True if it was written, False if it was there already.

    Raises RigctlError if something else lies at `destination` or it cannot be written.
    """
    if os.path.lexists(destination):
        if _holds(files, destination):
            return False
        raise RigctlError(f"{destination} exists and is not this checkpoint; move it away or name another directory")
    if not destination.parent.is_dir():
        raise RigctlError(f"{destination.parent} is no directory; make it first")
    try:
        _write(files, destination)
    except OSError as error:
        raise RigctlError(f"cannot write {destination}: {error.strerror} ({error.filename})") from error
    return True


def _holds(files: Mapping[str, bytes], directory: Path) -> bool:
    if directory.is_symlink() or not directory.is_dir():
        return False
    try:
        if {path.name for path in directory.iterdir()} != set(files):
            return False
        return all((directory / name).read_bytes() == data for name, data in files.items())
    except OSError as error:
        raise RigctlError(f"cannot read {directory}: {error.strerror} ({error.filename})") from error


def _write(files: Mapping[str, bytes], destination: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        for name, data in files.items():
            with (temporary / name).open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)
                os.fsync(stream.fileno())
        temporary.chmod(0o755)
        temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
