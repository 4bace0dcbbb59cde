"""Put a generated directory in its place: whole or not at all, never over something else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rigctl.errors import RigctlError


def publish(files: Mapping[str, bytes], destination: Path) -> bool:
    """Write a flat directory of world-readable files; True if it was written, False if it was there already.

    Raises RigctlError if something else lies at `destination` or it cannot be written.
    """
    if not destination.parent.is_dir():
        raise RigctlError(f"{destination.parent} is no directory; make it first")
    try:
        if os.path.lexists(destination):
            if _holds(files, destination):
                return False
            raise RigctlError(
                f"{destination} exists and is not this checkpoint; move it away or name another directory"
            )
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as beside:
            fresh = Path(beside, destination.name)
            fresh.mkdir()
            fresh.chmod(0o755)
            for name, data in files.items():
                with (fresh / name).open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fchmod(stream.fileno(), 0o644)
                    os.fsync(stream.fileno())
            fresh.rename(destination)
    except OSError as error:
        raise RigctlError(f"{destination} cannot be made or read: {error.strerror} ({error.filename})") from error
    return True


def _holds(files: Mapping[str, bytes], directory: Path) -> bool:
    if directory.is_symlink() or not directory.is_dir() or {path.name for path in directory.iterdir()} != set(files):
        return False
    return all((directory / name).read_bytes() == data for name, data in files.items())
