"""Names that are safe to create below a directory, and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError

NAME_MAX = 255  # bytes a path component, the limit of ext4, xfs and NFS


def safe_relative(path: str) -> str:
    """Return `path` if it names a file strictly below a directory, else raise RigctlError."""
    reason = _unsafe_because(path)
    if reason:
        raise RigctlError(f"unsafe file name {path!r}: {reason}; refuse the manifest or its source")
    return path


def _unsafe_because(path: str) -> str | None:  # noqa: PLR0911 one reason each
    if not path:
        return "it is empty"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "it has control characters"
    if "\\" in path:
        return "it has a backslash"
    if path.startswith("/"):
        return "it is absolute"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "it has empty, '.' or '..' parts"
    if any(len(os.fsencode(part)) > NAME_MAX for part in parts):
        return f"a part is longer than {NAME_MAX} bytes"
    return None


def refuse_conflicts(paths: Iterable[str]) -> None:
    """Raise if a name occurs twice or is needed both as a file and as a directory."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise RigctlError(f"file name {path!r} occurs twice in the manifest")
        seen.add(path)
    for path in seen:
        for parent in Path(path).parents:
            if str(parent) in seen:
                raise RigctlError(f"{str(parent)!r} is both a file and the directory of {path!r}")


def inside(root: Path, relative: str) -> Path:
    """The place of `relative` below `root`; no directory on the way may be a symbolic link."""
    safe_relative(relative)
    place = root
    for part in relative.split("/")[:-1]:
        place = place / part
        if place.is_symlink():
            raise RigctlError(f"{place} is a symbolic link: refusing to write through it")
    return root / relative


def make_parents(root: Path, relative: str) -> Path:
    """`inside`, with the directories made."""
    place = inside(root, relative)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def is_regular(path: Path) -> bool:
    """A plain file itself, not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write `text` to `path` so that readers see the old or the new file, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """`write_whole` of JSON."""
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n", durable=durable)


def read_json(path: Path, what: str) -> Any:
    """Parse `path`; a missing or broken file is a RigctlError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RigctlError(f"{what} {path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RigctlError(f"{what} {path} cannot be read: {error}") from error


def remove_tree(directory: Path) -> None:
    """Remove a directory of our own making."""
    for place, names, files in os.walk(directory, topdown=False):
        for name in files:
            (Path(place) / name).unlink(missing_ok=True)
        for name in names:
            child = Path(place) / name
            if child.is_symlink():
                child.unlink()
            else:
                child.rmdir()
    if directory.is_dir():
        directory.rmdir()
