"""Files and the page cache: what of them is in memory, reading them into it, taking them out."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rigctl.reached import readable

BLOCK = 4 << 20


def files_below(places: Iterable[str | None]) -> list[Path]:
    """The files of these directories, each once."""
    return sorted({path.resolve() for place in places if place for path in Path(place).rglob("*") if path.is_file()})


def cached(path: Path) -> int:
    """How many bytes of a file are in the page cache, by one byte of each block; reading them would not wait."""
    found, size = 0, path.stat().st_size
    with readable(path) as file:
        for offset in range(0, size, BLOCK):
            try:
                os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            except OSError:  # it is not, or this file system cannot tell
                continue
            found += min(BLOCK, size - offset)
    return found


def blocks(path: Path) -> Iterator[int]:
    """Read a file to its end; the size of each block."""
    buffer = bytearray(BLOCK)
    with readable(path) as file:
        while size := file.readinto(buffer):
            yield size


def evict(path: Path) -> None:
    """Take a file out of the page cache; what is not on disk yet is written first."""
    with readable(path) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
