"""A Python environment as its files say it is: site-packages, distributions, RECORD entries. Reads only.

RECORD, by PyPA's "Recording installed projects": path, hash (urlsafe base64 without padding), size.
"""

from __future__ import annotations

import base64
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rigctl.errors import RigctlError


@dataclass(frozen=True)
class RecordEntry:
    """One line of a RECORD: path below site-packages (may start with ../), SHA-256 in hex, size in bytes."""

    path: str
    sha256: str | None
    size: int | None


@dataclass(frozen=True)
class Distribution:
    """One installed distribution; `name` is normalised (PEP 503)."""

    name: str
    version: str
    dist_info: Path

    def record(self) -> Iterator[RecordEntry]:
        """Entries of its RECORD; `RigctlError` if there is none (half removed, or not from a wheel)."""
        try:
            text = (self.dist_info / "RECORD").read_text()
        except FileNotFoundError:
            raise RigctlError(
                f"{self.dist_info}: no RECORD, so its files cannot be proved; install {self.name} again"
            ) from None
        for row in csv.reader(text.splitlines()):
            if row:
                yield _entry(row, self.dist_info)


def _entry(row: list[str], dist_info: Path) -> RecordEntry:
    path, hashed, size = (*row, "", "")[:3]
    if not hashed:
        return RecordEntry(path, None, None)
    algorithm, _, digest = hashed.partition("=")
    if algorithm != "sha256":
        raise RigctlError(f"{dist_info}/RECORD: {path}: {algorithm} instead of sha256")
    raw = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    return RecordEntry(path, raw.hex(), int(size) if size else None)


def normalised(name: str) -> str:
    """Distribution name in the form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(environment: Path) -> Path:
    """The one site-packages of a virtual environment; `RigctlError` if there is none or more than one."""
    found = sorted(environment.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise RigctlError(
            f"{environment}: {len(found)} directories lib/python3.*/site-packages, expected one; "
            "name a virtual environment, or its site-packages with --path"
        )
    return found[0]


def interpreter(environment: Path) -> Path:
    """The environment's own Python (not resolved: the link is what makes it this environment)."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise RigctlError(f"{python}: not there; name a virtual environment")
    return python


def distributions(site: Path) -> list[Distribution]:
    """Installed distributions of a site-packages, by name. Two of one name are both listed."""
    if not site.is_dir():
        raise RigctlError(f"{site}: no such directory")
    found = []
    for dist_info in site.glob("*.dist-info"):
        name, _, version = dist_info.name.removesuffix(".dist-info").partition("-")
        found.append(Distribution(normalised(name), version, dist_info))
    return sorted(found, key=lambda each: (each.name, each.version))


def recorded(site: Path, paths: set[str]) -> dict[str, tuple[Distribution, RecordEntry]]:
    """What RECORD files say of some paths; of two owners the later one by name."""
    owners: dict[str, tuple[Distribution, RecordEntry]] = {}
    for distribution in distributions(site):
        record = distribution.dist_info / "RECORD"
        # Most RECORDs name none of the paths: parsing them all would take a second.
        if not record.exists() or not any(path in record.read_text() for path in paths):
            continue
        owners |= {entry.path: (distribution, entry) for entry in distribution.record() if entry.path in paths}
    return owners
