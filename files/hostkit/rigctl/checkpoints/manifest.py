"""Manifests: what a checkpoint consists of, file by file, with the digests that prove it.

JSON: {"format": 1, "source": str, "revision": str | null,
       "files": [{"path": str, "size": bytes, "sha256": hex | "git_sha1": hex}]}
A hub lists sha256 for large files, for small ones only the git blob id (SHA-1 of a header and the content).
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rigctl.checkpoints.paths import read_json, refuse_conflicts, safe_relative
from rigctl.errors import RigctlError

FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Entry:
    """One file: relative path, size in bytes, and a sha256 or a git blob id (lower-case hex)."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of this file."""
        content: dict[str, Any] = {"path": self.path, "size": self.size}
        if self.sha256:
            content["sha256"] = self.sha256
        if self.git_sha1:
            content["git_sha1"] = self.git_sha1
        return content

    def digest(self) -> str:
        """The digest to compare, named: `sha256:...` or `git_sha1:...`."""
        return f"sha256:{self.sha256}" if self.sha256 else f"git_sha1:{self.git_sha1}"

    def hasher(self) -> FileHasher:
        """A hasher of the kind this file is proved by."""
        return FileHasher("sha256" if self.sha256 else "git_sha1", self.size)


class FileHasher:
    """Digest of a file of known size, as `sha256:...` or `git_sha1:...`."""

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        if kind == "sha256":
            self._hash = hashlib.sha256()
        else:
            # git's blob id; not used for security where a sha256 is known
            self._hash = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        self._hash.update(data)

    def digest(self) -> str:
        """The named digest of everything so far."""
        return f"{self._kind}:{self._hash.hexdigest()}"


@dataclass(frozen=True)
class Manifest:
    """All files of one checkpoint at one revision; sorted by path, no name unsafe or twice."""

    source: str
    revision: str | None
    files: tuple[Entry, ...]
    _by_path: dict[str, Entry] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(sorted(self.files, key=lambda entry: entry.path)))
        for entry in self.files:
            safe_relative(entry.path)
        refuse_conflicts(entry.path for entry in self.files)
        self._by_path.update({entry.path: entry for entry in self.files})

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    def get(self, path: str) -> Entry | None:
        """The entry of a path, or None."""
        return self._by_path.get(path)

    def select(self, include: Sequence[str], exclude: Sequence[str]) -> Manifest:
        """The files that match an include pattern (none: all) and no exclude one (fnmatch, * crosses /)."""
        kept = tuple(entry for entry in self.files if is_selected(entry.path, include, exclude))
        if not kept:
            raise RigctlError(f"{self.source}: the include and exclude patterns leave no file")
        return replace(self, files=kept, _by_path={})

    def agreeing(self, digests: Mapping[str, str]) -> Manifest:
        """This manifest with the sha256 that are known of some files from elsewhere; raises where it disagrees."""
        files = list(self.files)
        for path, sha256 in digests.items():
            entry = self.get(path)
            if entry is None:
                raise RigctlError(f"{self.source} lists no {path}, whose digest is known: it is not that revision")
            if entry.sha256 not in (None, sha256):
                raise RigctlError(
                    f"{self.source}: {path} has sha256 {entry.sha256}, {sha256} is known: it is not that revision"
                )
            files[files.index(entry)] = replace(entry, sha256=sha256)
        return replace(self, files=tuple(files), _by_path={})

    def describes(self, other: Manifest) -> bool:
        """Whether both list the same files: equal sizes, and no digest of one contradicts the other's."""
        return [entry.path for entry in self.files] == [entry.path for entry in other.files] and all(
            mine.size == theirs.size
            and (mine.sha256 == theirs.sha256 or None in (mine.sha256, theirs.sha256))
            and (mine.git_sha1 == theirs.git_sha1 or None in (mine.git_sha1, theirs.git_sha1))
            for mine, theirs in zip(self.files, other.files, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written to disk."""
        return {
            "format": FORMAT,
            "source": self.source,
            "revision": self.revision,
            "files": [entry.to_json() for entry in self.files],
        }

    def identity(self) -> str:
        """sha256 over paths, sizes and digests: equal for equal content, whatever the source."""
        lines = json.dumps([entry.to_json() for entry in self.files], sort_keys=True)
        return hashlib.sha256(lines.encode()).hexdigest()


def is_selected(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the patterns of a checkpoint's entry keep this path; exclude wins."""
    if include and not any(fnmatch.fnmatchcase(path, pattern) for pattern in include):
        return False
    return not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)


def parse(content: Any, where: str) -> Manifest:
    """Check the JSON form; every fault names `where` and the file."""
    if not isinstance(content, Mapping):
        raise RigctlError(f"{where}: a manifest is a JSON object")
    if content.get("format") != FORMAT:
        raise RigctlError(f"{where}: manifest format {content.get('format')!r}, this program reads {FORMAT}")
    files = content.get("files")
    if not isinstance(files, list) or not files:
        raise RigctlError(f"{where}: a manifest needs a list of files")
    revision = content.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise RigctlError(f"{where}: revision must be text or null")
    entries = tuple(_parse_entry(item, f"{where}, file {number}") for number, item in enumerate(files))
    return Manifest(str(content.get("source", where)), revision, entries)


def _parse_entry(item: Any, where: str) -> Entry:
    if not isinstance(item, Mapping) or not isinstance(item.get("path"), str):
        raise RigctlError(f"{where}: needs a path")
    where = f"{where} ({item['path']!r})"
    unknown = set(item) - {"path", "size", "sha256", "git_sha1"}
    if unknown:
        raise RigctlError(f"{where}: unknown key {sorted(unknown)[0]!r}")
    size = item.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise RigctlError(f"{where}: size must be a number of bytes")
    sha256, git_sha1 = item.get("sha256"), item.get("git_sha1")
    if sha256 is None and git_sha1 is None:
        raise RigctlError(f"{where}: needs sha256 or git_sha1, else nothing proves the file")
    for key, value, pattern in (("sha256", sha256, _SHA256), ("git_sha1", git_sha1, _SHA1)):
        if value is not None and not (isinstance(value, str) and pattern.fullmatch(value.lower())):
            raise RigctlError(f"{where}: {key} is not a digest: {value!r}")
    return Entry(item["path"], size, sha256.lower() if sha256 else None, git_sha1.lower() if git_sha1 else None)


def load(path: Path) -> Manifest:
    """Read a manifest file."""
    return parse(read_json(path, "manifest"), str(path))


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
