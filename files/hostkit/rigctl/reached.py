"""Paths of the operator's, such as a checkpoint's, on whose way other users may write: who could have led us there?

A user who can write a directory can exchange what is in it, at any moment, for a link to where root alone can read or
write. So a path is walked one name at a time, each from the descriptor of the directory before it, and what has been
seen on the way is kept with the last of them: what is then done from its descriptor is done in what was looked at.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from rigctl.guarded import Unsafe, opened, shared

LINKS = 40
"""As many as the kernel follows (path_resolution(7))."""
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class Reached:
    """The end of a path: a name, which need not exist, in a directory that is held open.

    path: the same without links. shared: directories on the way that others can write, and why. links: links on the
    way that another user made. owners: ids of those users.
    """

    directory: int
    path: str
    name: str = ""
    shared: dict[str, str] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    owners: set[int] = field(default_factory=set)

    def enter(self, directory: int, path: str) -> None:
        """Go on from another directory."""
        os.close(self.directory)
        self.directory, self.path = directory, path

    def passed(self, status: os.stat_result | None) -> None:
        """Look at the directory that a name was found in; status: of what has this name, None for nothing."""
        outer = os.fstat(self.directory)
        mine = (0, os.geteuid())
        kept = outer.st_mode & stat.S_ISVTX and outer.st_uid in mine and status is not None and status.st_uid in mine
        if (why := shared(outer)) and not kept:  # in a directory such as /tmp nobody else can exchange what is ours
            self.shared[self.path or "/"] = why
            self.owners |= {outer.st_uid}.difference(mine)


@contextmanager
def reached(path: str | os.PathLike[str]) -> Iterator[Reached]:
    """Go to a path. Raises OSError: FileNotFoundError for a directory on the way that is not there."""
    text, links = str(Path(path).absolute()), 0
    # Nobody leads us from a descriptor of our own.
    held = re.match(rf"/proc/{os.getpid()}/fd/(\d+)(?=/)", text)
    start = os.dup(int(held[1])) if held else os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    way = Reached(start, held[0] if held else "")
    todo = _names(text[len(way.path) :])
    try:
        while todo:
            name = todo.pop()
            here = f"{way.path}/{name}"
            try:
                inner = os.open(name, _STEP, dir_fd=way.directory)
            except OSError as error:
                if todo or error.errno != errno.ENOENT:
                    raise OSError(error.errno, error.strerror, here) from None
                way.passed(None)
                way.name = name
                break
            status = os.fstat(inner)
            way.passed(status)
            if stat.S_ISLNK(status.st_mode):
                target, links = os.readlink("", dir_fd=inner), links + 1
                os.close(inner)
                if links > LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), here)
                if status.st_uid not in (0, os.geteuid()):
                    way.links.append(here)
                    way.owners.add(status.st_uid)
                todo += _names(target)
                if target.startswith("/"):
                    way.enter(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), "")
            elif todo:
                way.enter(inner, str(Path(way.path).parent).rstrip("/") if name == ".." else here)
            else:
                os.close(inner)
                way.name = name
        way.path = f"{way.path}/{way.name}"
        yield way
    finally:
        os.close(way.directory)


def _names(path: str) -> list[str]:
    """The names of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


@contextmanager
def readable(path: Path) -> Iterator[FileIO]:
    """A regular file for reading; a pipe is never waited for. Raises OSError, Unsafe.

    Root reads what another user's link, or a second name of a file, leads it to only where that user, or everyone, may
    read it too. Without one, what is found lies where the path says, whoever can write there.
    """
    with reached(path) as way:
        descriptor = opened(way.directory, way.name, str(path))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unsafe("it is no regular file", str(path))
        led = [*way.links, *(way.shared if status.st_nlink > 1 else ())]
        if led and not os.geteuid() and not status.st_mode & stat.S_IROTH and status.st_uid not in way.owners:
            raise Unsafe(f"others choose what lies there ({', '.join(led)}), and not everyone may read it", str(path))
        yield file


def content(path: Path, limit: int) -> bytes:
    """A whole file that is `readable`, of at most `limit` bytes."""
    with readable(path) as file:
        found = file.read(limit + 1)
    if len(found) > limit:
        raise Unsafe(f"it is longer than {limit} bytes", str(path))
    return found
