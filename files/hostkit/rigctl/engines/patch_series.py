"""A patch series: reading unified diffs with our header, and applying their hunks to bytes.

Hunks must fit at their exact lines. `patch` and `git apply` both slide them to other lines (and git skips
files outside a repository's directory without a word), which with one line of context is a wrong edit waiting
to happen. So the reading is ours; the files remain ordinary input for either tool.
"""

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
    header = _header(name, head.decode(errors="replace"))
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
    first, second, body = (*part.split(b"\n", maxsplit=2), b"", b"")[:3]
    old, new = (line.removeprefix(b"+++ ").split()[:1] or [b""] for line in (first, second))
    if old[0].partition(b"/")[2] != new[0].partition(b"/")[2] or b"/dev/null" in (old[0], new[0]):
        raise RigctlError(f"{name}: {_shown(first)} -> {_shown(second)}: only changes to a file under its own name")
    path = PurePosixPath(new[0].decode(errors="replace").partition("/")[2])
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RigctlError(f"{name}: {path}: outside site-packages")
    return FilePatch(str(path), tuple(_hunks(name, body)))


def _hunks(name: str, body: bytes) -> Iterator[Hunk]:
    before, *parts = re.split(rb"^(?=@@ )", body, flags=re.MULTILINE)
    if before:
        raise RigctlError(f"{name}: expected a hunk, found {_shown(before)}")
    for head, *lines in (part.splitlines(keepends=True) for part in parts):
        match = HUNK.match(head)
        if not match:
            raise RigctlError(f"{name}: expected a hunk, found {_shown(head)}")
        if stray := [line for line in lines if line[:1] not in (b" ", b"-", b"+")]:
            raise RigctlError(f"{name}: {_shown(match[0])}: unexpected line {_shown(stray[0])}")
        old, new = ([line[1:] for line in lines if line[:1] in kinds] for kinds in ((b" ", b"-"), (b" ", b"+")))
        old_start, old_count, new_start, new_count = (int(each or 1) for each in match.groups())
        if (len(old), len(new)) != (old_count, new_count):
            raise RigctlError(f"{name}: {_shown(match[0])}: {len(old)} old and {len(new)} new lines")
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
