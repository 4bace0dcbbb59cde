"""Manifests: what a checkpoint consists of, file by file, with the digests that prove it.

A hub lists sha256 for large files, for small ones only the git blob id (SHA-1 of a header and the content).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from rigctl.contract.order import ContractError, Document, Order, Part
from rigctl.contract.sources import Source

NAME_MAX = 255  # bytes a path component, the limit of ext4, xfs and NFS


class UnsafeName(ContractError, ValueError):
    """A file name that must not be created below a directory."""


def safe_relative(path: str) -> str:
    """Return `path` if it names a file strictly below a directory, else raise UnsafeName."""
    parts = path.split("/")
    reasons = {
        "it is empty": not path,
        "it has control characters": any(ord(character) < 32 or ord(character) == 127 for character in path),
        "it has a backslash": "\\" in path,
        "it is absolute": path.startswith("/"),
        "it has empty, '.' or '..' parts": bool({"", ".", ".."} & set(parts)),
        f"a part is longer than {NAME_MAX} bytes": any(len(os.fsencode(part)) > NAME_MAX for part in parts),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsafeName(f"unsafe file name {path!r}: {reason}; refuse the manifest or its source")
    return path


def _digest(digits: int) -> StringConstraints:
    return StringConstraints(pattern=f"^[0-9a-fA-F]{{{digits}}}$", to_lower=True)


class File(Part):
    """One file: relative path, size in bytes, and a sha256 or a git blob id (hex)."""

    path: Annotated[str, AfterValidator(safe_relative)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, _digest(64)] | None = None
    git_sha1: Annotated[str, _digest(40)] | None = None

    @model_validator(mode="after")
    def _is_proved(self) -> Self:
        if self.sha256 is None and self.git_sha1 is None:
            raise ValueError("needs sha256 or git_sha1, else nothing proves the file")
        return self

    def digests(self) -> list[str]:
        """Every digest that is known, named as `digest` does."""
        return [f"{kind}:{value}" for kind in ("sha256", "git_sha1") if (value := getattr(self, kind))]

    def digest(self) -> str:
        """The digest to compare, named: `sha256:...` or `git_sha1:...`."""
        return f"sha256:{self.sha256}" if self.sha256 else f"git_sha1:{self.git_sha1}"


class Manifest(Order):
    """All files of one checkpoint at one revision; sorted by path, no name unsafe or twice."""

    FORMAT: ClassVar[int] = 1

    source: str = "an unnamed source"
    revision: str | None = None
    files: Annotated[tuple[File, ...], Field(strict=False)]

    @field_validator("files")
    @classmethod
    def _names_are_apart(cls, files: tuple[File, ...]) -> tuple[File, ...]:
        if not files:
            raise ValueError("a manifest lists at least one file")
        seen: set[str] = set()
        for file in files:
            if file.path in seen:
                raise ValueError(f"file name {file.path!r} occurs twice in the manifest")
            seen.add(file.path)
        for path in seen:
            for parent in map(str, PurePosixPath(path).parents):
                if parent in seen:
                    raise ValueError(f"{parent!r} is both a file and the directory of {path!r}")
        return tuple(sorted(files, key=lambda file: file.path))

    @classmethod
    def listed(cls, source: str, revision: str | None, files: Iterable[Mapping[str, object] | File]) -> Self:
        """The manifest of what a source lists. Raises ContractError, as for a manifest that was read."""
        return cls.parse({"format": cls.FORMAT, "source": source, "revision": revision, "files": list(files)}, source)

    def document(self) -> Document:
        """The manifest as JSON values; of a file only the digests that are known."""
        files = [file.model_dump(exclude_none=True) for file in self.files]
        return {"format": self.FORMAT, "source": self.source, "revision": self.revision, "files": files}

    def identity(self) -> str:
        """sha256 over paths, sizes and digests: equal for equal content, whatever the source."""
        return hashlib.sha256(json.dumps(self.document()["files"], sort_keys=True).encode()).hexdigest()

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def by_path(self) -> Mapping[str, File]:
        return {file.path: file for file in self.files}

    def wanted(self, source: Source, digests: Mapping[str, str]) -> Self:
        """The files that the source's patterns select, with the sha256 that are known of them from elsewhere.

        Raises ContractError where nothing is selected, or a digest disagrees.
        """
        kept = {file.path: file for file in self.files if source.selects(file.path)}
        if not kept:
            raise ContractError(f"{self.source}: the include and exclude patterns leave no file")
        for path, sha256 in digests.items():
            if not source.selects(path):
                continue
            if path not in kept:
                raise ContractError(f"{self.source} lists no {path}, whose digest is known: it is not that revision")
            listed = kept[path].sha256
            if listed not in (None, sha256):
                raise ContractError(
                    f"{self.source}: {path} has sha256 {listed}, {sha256} is known: it is not that revision"
                )
            kept[path] = kept[path].model_copy(update={"sha256": sha256})
        return type(self)(source=self.source, revision=self.revision, files=tuple(kept.values()))

    def differing(self, right: "Manifest") -> list[File]:
        """Files of another manifest of the same content that this one does not confirm by a digest of the same kind."""
        same = {(file.path, file.size, digest) for file in self.files for digest in file.digests()}
        return [
            file for file in right.files if not any((file.path, file.size, digest) in same for digest in file.digests())
        ]

    def describes(self, other: "Manifest") -> bool:
        """Whether both list the same files: equal sizes, and no digest of one contradicts the other's."""
        return self.by_path.keys() == other.by_path.keys() and all(
            mine.size == theirs.size
            and (mine.sha256 == theirs.sha256 or None in (mine.sha256, theirs.sha256))
            and (mine.git_sha1 == theirs.git_sha1 or None in (mine.git_sha1, theirs.git_sha1))
            for mine, theirs in zip(self.files, other.files, strict=True)
        )
