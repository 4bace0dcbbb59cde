"""Files that are written whole or not at all, and JSON that is read with a message that names the file."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError
from rigctl.guarded import not_written
from rigctl.reached import content

JSON_BYTES = 256 << 20
"""The largest that is read: a manifest, or the index of a checkpoint with a million tensors."""


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write `text` to `path` so that readers see the old or the new file, never a part.

    Raises OSError that names the file, and for a full disk what is needed.
    """
    size = len(text.encode())
    temporary = path.with_name("no file yet")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        raise not_written(error, str(path), size) from None
    if durable:
        sync_directory(path.parent)


def write_json(path: Path, content: Any, mode: int = 0o644, *, durable: bool = True) -> None:
    """`write_whole` of JSON."""
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n", mode, durable=durable)


def read_json(path: Path, what: str) -> Any:
    """Parse `path`; a missing or broken file is a RigctlError that names it."""
    try:
        return json.loads(content(path, JSON_BYTES))
    except FileNotFoundError:
        raise RigctlError(f"{what} {path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RigctlError(f"{what} {path} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when it is absent or unreadable."""
    try:
        found = json.loads(content(path, JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
