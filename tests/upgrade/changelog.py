"""The versions that CHANGELOG.md names: the one that is being made, and those that have landed, each by its commit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rig.catalog.entries import ROOT

CHANGELOG = ROOT / "CHANGELOG.md"
UNRELEASED = re.compile(r"## Unreleased \((\d+\.\d+\.\d+)\)")
LANDED = re.compile(r"## (\d+\.\d+\.\d+) \(([0-9a-f]{7,40}), (\d{4}-\d{2}-\d{2})\)")


@dataclass(frozen=True)
class Landed:
    """A version by which hosts may have been deployed."""

    number: str
    commit: str
    date: str


def versions(text: str) -> tuple[str, list[Landed]]:
    """Number of the version that is being made, and the landed ones, newest first.

    Raises ValueError, naming the line, for a section that is neither.
    """
    first, *others = [line for line in text.splitlines() if line.startswith("## ")]
    unreleased = UNRELEASED.fullmatch(first)
    if unreleased is None:
        raise ValueError(f"CHANGELOG.md: {first!r} comes first; `## Unreleased (0.2.0)` is expected")
    landed = []
    for line in others:
        found = LANDED.fullmatch(line)
        if found is None:
            raise ValueError(f"CHANGELOG.md: {line!r}; `## 0.1.0 (e91294b, 2026-11-30)` is expected")
        landed.append(Landed(*found.groups()))
    return unreleased[1], landed


def previous() -> Landed:
    """The version from which hosts are upgraded to this one."""
    return versions(CHANGELOG.read_text(encoding="utf-8"))[1][0]
