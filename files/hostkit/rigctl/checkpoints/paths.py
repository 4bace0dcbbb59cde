"""Places below a directory: made, walked and removed without following links."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from rigctl.contract.manifest import safe_relative
from rigctl.errors import RigctlError


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


def remove_tree(directory: Path) -> None:
    """Remove a directory of our own making, if it is there; links in it are not followed."""
    if directory.is_dir():
        shutil.rmtree(directory)


def allocated(places: Iterable[Path]) -> int:
    """Bytes that files have on the disk by now; one that is not there, or not any more, has none."""
    total = 0
    for place in places:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = place.stat()
            total += min(status.st_blocks * 512, status.st_size)
    return total


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Files below `root` as (relative path, place), sorted; directories that are links are not entered.

    Links to files are given as files: hub caches and operators' model directories are made of them.
    """
    for directory, names, files in os.walk(root, followlinks=False):
        names.sort()
        links = [name for name in names if (Path(directory) / name).is_symlink()]
        for name in sorted(files + links):
            place = Path(directory) / name
            yield place.relative_to(root).as_posix(), place
