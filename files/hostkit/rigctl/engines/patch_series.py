"""A patch series: reading unified diffs with our header, and applying their hunks to bytes.

Hunks must fit at their exact lines. `patch` and `git apply` both slide them to other lines (and git skips
files outside a repository's directory without a word), which with one line of context is a wrong edit waiting
to happen. So the reading is ours; the files remain ordinary input for either tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rigctl.errors import RigctlError

HEADER = ("What", "Why", "Upstream", "Native-from", "Native-if")
HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class MismatchError(Exception):
    """A hunk that does not fit: says which, at which line, what is expected and what is found."""


@dataclass(frozen=True)
class Side:
    """One side of a hunk: index of its first line in the file, and its lines."""

    at: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class Hunk:
    """One hunk; `old` and `new` include the context."""

    old: Side
    new: Side


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one patch for one file; `path` is relative to site-packages."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One file of a series: its header and what it changes."""

    name: str
    header: dict[str, str]
    files: tuple[FilePatch, ...]

    def is_native(self, site: Path) -> bool:
        """Does the tree have the feature by itself (header `Native-if: GLOB :: REGEX`)?"""
        glob, _, expression = self.header["Native-if"].partition(" :: ")
        feature = re.compile(expression)
        return any(feature.search(path.read_text()) for path in sorted(site.glob(glob)))


def read_series(directory: Path) -> tuple[Patch, ...]:
    """The patches of a series by name; `RigctlError` if one is malformed or there is none."""
    names = sorted(directory.glob("*.patch"))
    if not names:
        raise RigctlError(f"{directory}: no *.patch there")
    return tuple(parse_patch(path.name, path.read_bytes()) for path in names)


def parse_patch(name: str, text: bytes) -> Patch:
    """Read one patch. Only changes to existing files; every header line must be there."""
    head, separator, body = text.partition(b"\n--- ")
    if not separator:
        raise RigctlError(f"{name}: no '--- ' line: not a unified diff with a header")
    header = _header(name, head.decode())
    files = tuple(_file_patch(name, part) for part in re.split(rb"^--- ", body, flags=re.MULTILINE))
    return Patch(name, header, files)


def _header(name: str, text: str) -> dict[str, str]:
    header: dict[str, str] = {}
    for key, value in re.findall(r"^([A-Z][A-Za-z-]*): (.*(?:\n .*)*)", text, flags=re.MULTILINE):
        header[key] = " ".join(value.split()) if key != "Native-if" else value
    if missing := [key for key in HEADER if key not in header]:
        raise RigctlError(f"{name}: header lacks {', '.join(missing)}")
    if " :: " not in header["Native-if"]:
        raise RigctlError(f"{name}: Native-if is 'GLOB :: REGEX'")
    try:
        re.compile(header["Native-if"].partition(" :: ")[2])
    except re.error as error:
        raise RigctlError(f"{name}: Native-if: {error}") from None
    return header


def _file_patch(name: str, part: bytes) -> FilePatch:
    lines = part.splitlines(keepends=True)
    old, new = lines[0].split()[0], lines[1].split()[1] if len(lines) > 1 else b""
    if old.partition(b"/")[2] != new.partition(b"/")[2] or b"/dev/null" in (old, new):
        raise RigctlError(f"{name}: {old.decode()} -> {new.decode()}: only changes to a file under its own name")
    path = PurePosixPath(new.decode().partition("/")[2])
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RigctlError(f"{name}: {path}: outside site-packages")
    return FilePatch(str(path), tuple(_hunks(name, lines[2:])))


def _hunks(name: str, lines: Sequence[bytes]) -> Iterator[Hunk]:
    position = 0
    while position < len(lines):
        match = HUNK.match(lines[position])
        if not match:
            raise RigctlError(f"{name}: expected a hunk, found {lines[position]!r}")
        old_start, old_count, new_start, new_count = (int(each or 1) for each in match.groups())
        old: list[bytes] = []
        new: list[bytes] = []
        position += 1
        while position < len(lines) and (len(old) < old_count or len(new) < new_count):
            kind, line = lines[position][:1], lines[position][1:]
            if kind not in (b" ", b"-", b"+"):
                raise RigctlError(f"{name}: {match[0].decode()}: unexpected line {lines[position]!r}")
            if kind != b"+":
                old.append(line)
            if kind != b"-":
                new.append(line)
            position += 1
        if len(old) != old_count or len(new) != new_count:
            raise RigctlError(f"{name}: {match[0].decode()}: {len(old)} old and {len(new)} new lines")
        yield Hunk(_side(old_start, old), _side(new_start, new))


def _side(start: int, lines: list[bytes]) -> Side:
    # A side without lines is numbered by the line before it.
    return Side(start - 1 if lines else start, tuple(lines))


def patched(content: bytes, hunks: Sequence[Hunk], *, reverse: bool = False) -> bytes:
    """`content` with all hunks applied, or taken back; `MismatchError` at the first that does not fit."""
    lines = content.splitlines(keepends=True)
    result: list[bytes] = []
    taken = 0
    for number, hunk in enumerate(hunks, start=1):
        before, after = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        _must_fit(lines, before, number)
        result += [*lines[taken : before.at], *after.lines]
        taken = before.at + len(before.lines)
    return b"".join(result + lines[taken:])


def _must_fit(lines: Sequence[bytes], side: Side, number: int) -> None:
    for offset, expected in enumerate(side.lines):
        at = side.at + offset
        found = lines[at] if at < len(lines) else b"<end of file>"
        if found != expected:
            raise MismatchError(f"hunk {number}, line {at + 1}: expected {_shown(expected)}, found {_shown(found)}")


def _shown(line: bytes) -> str:
    return repr(line.decode(errors="replace").rstrip("\n"))
