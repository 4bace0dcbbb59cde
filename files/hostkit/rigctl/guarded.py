"""Access below a directory that another user can write: by descriptor, never by path.

The service user owns its units' directories in /run, /var/lib, /var/log and /var/cache (layout.py). A compromised
engine is that user: it can put a link, a pipe or a huge file where root reads, and exchange any name between a look and
an access. So a directory is opened once, without following a link, and each name in it is resolved from its descriptor.

Standard library only: the facts script carries this file to hosts that have nothing of ours yet (rig/facts/report.py).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

RECORD_BYTES = 1 << 20
"""More than any record of a unit needs: a longer one is not read."""
DEPTH = 16
"""Levels that a walk enters: each holds a descriptor."""

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NEVER = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Unsafe(OSError):
    """What lies there is not what may be used there; strerror says why, filename where."""

    def __init__(self, why: str, where: str) -> None:
        super().__init__(errno.EPERM, why, where)


def not_written(error: OSError, where: str, size: int) -> OSError:
    """The failed write of a file, with its path, and for a full disk with what is needed."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    need = f": {size} bytes are needed; make room and try again" if full else ""
    return OSError(error.errno, f"{error.strerror}{need}", where)


def shared(status: os.stat_result) -> str | None:
    """In words who else can write a directory; None where it is ours, or root's, alone."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})" if status.st_mode & 0o022 else None


def opened(directory: int, name: str, where: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Descriptor of `name` in a directory; a link is refused, and a pipe never waits for its other end.

    where: the whole path, for messages. mode: of a new file, under the umask. Raises OSError, Unsafe.
    """
    if name in ("", ".", "..") or "/" in name:
        raise Unsafe("it is not the name of one file", where)
    try:
        return os.open(name, flags | _NEVER, mode, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and flags & os.O_DIRECTORY):
            raise Unsafe("it is a symbolic link, or no directory", where) from None
        raise OSError(error.errno, error.strerror, where) from None


@contextmanager
def regular(directory: int, name: str, where: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A regular file with one name, of the directory's owner, ours or root's. Raises OSError, Unsafe."""
    descriptor = opened(directory, name, where, flags, mode)
    try:
        if why := _unfit(os.fstat(descriptor), os.fstat(directory).st_uid):
            raise Unsafe(why, where)
        read_only = flags & os.O_ACCMODE == os.O_RDONLY
        with os.fdopen(descriptor, "rb" if read_only else "r+b", buffering=0, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _unfit(status: os.stat_result, owner: int) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_nlink > 1:
        return "it has a second name (a hard link)"
    if status.st_uid not in (0, os.geteuid(), owner):
        return f"it belongs to user {status.st_uid}, its directory to {owner}"
    return None


def remove(directory: int, *names: str) -> None:
    """Remove files, and directories with all in them; what is not there, or is exchanged meanwhile, is no fault. Raises
    OSError."""
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                shutil.rmtree(name, dir_fd=directory)


@dataclass(frozen=True)
class Place:
    """A directory that may be another user's, in one that is ours or root's alone. No path on purpose: nothing opens it
    by name. Each method may raise OSError, and Unsafe where somebody has put something else there.
    """

    path: str

    def __str__(self) -> str:
        return self.path

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor, while the block runs."""
        above, _, name = self.path.rpartition("/")
        # Links on the way there are ours: nobody else can write a directory on the way.
        outer = os.open(above or "/", DIRECTORY | os.O_CLOEXEC)
        try:
            if why := shared(os.fstat(outer)):
                raise Unsafe(f"{why}: nothing is opened in it", above)
            inner = opened(outer, name, self.path, DIRECTORY)
        finally:
            os.close(outer)
        try:
            yield inner
        finally:
            os.close(inner)

    @contextmanager
    def open(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[BinaryIO]:
        """`regular` in this directory."""
        with self.opened() as directory, regular(directory, name, f"{self.path}/{name}", flags, mode) as file:
            yield file

    def read(self, name: str, limit: int = RECORD_BYTES) -> bytes:
        """A whole file of at most `limit` bytes."""
        with self.open(name) as file:
            content = b""
            while (chunk := file.read(limit + 1 - len(content))) and len(content) <= limit:
                content += chunk
        if len(content) > limit:
            raise Unsafe(f"it is longer than {limit} bytes", f"{self.path}/{name}")
        return content

    def write(self, name: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file so that readers see the old or the new one, never a part."""
        where, temporary = f"{self.path}/{name}", f".{name}.{secrets.token_hex(8)}"
        with self.opened() as directory:
            try:
                with os.fdopen(opened(directory, temporary, where, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    file.write(content)
                    os.fchmod(file.fileno(), mode)
                os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException as error:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                if isinstance(error, OSError):
                    raise not_written(error, where, len(content)) from None
                raise

    def make(self, name: str, mode: int) -> None:
        """Make a directory in it, or give the one that is there this mode."""
        with self.opened() as directory:
            with suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=directory)
            inner = opened(directory, name, f"{self.path}/{name}", DIRECTORY)
            try:
                os.fchmod(inner, mode)
            finally:
                os.close(inner)

    def remove(self, *names: str) -> None:
        """`remove` in this directory, which need not be there itself."""
        with suppress(FileNotFoundError), self.opened() as directory:
            remove(directory, *names)

    def names(self, end: str) -> list[str]:
        """Sorted names of plain letters with this end, whatever they are of; none where the place is missing."""
        with suppress(FileNotFoundError), self.opened() as directory:
            names = os.listdir(directory)  # noqa: PTH208  # of a descriptor
            return sorted(name for name in names if name.endswith(end) and re.fullmatch(r"[\w.:+-]+", name, re.ASCII))
        return []

    def walk(self, below: str) -> Iterator[tuple[int, str]]:
        """(descriptor of its directory, name) of each file below a directory in it; no link is entered."""
        with suppress(FileNotFoundError), self.opened() as directory:
            for root, names, files, descriptor in os.fwalk(below, dir_fd=directory, follow_symlinks=False):
                if root.count("/") >= DEPTH:
                    names.clear()
                yield from ((descriptor, name) for name in files)
