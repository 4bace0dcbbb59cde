"""A Python environment as its files say it is: site-packages, distributions, RECORD entries. Reads only.

RECORD, by PyPA's "Recording installed projects": path, hash (urlsafe base64 without padding), size.
"""

import base64
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rigctl.errors import RigctlError


@dataclass(frozen=True)
class Distribution:
    """One installed distribution; `name` is normalised (PEP 503)."""

    name: str
    version: str
    dist_info: Path

    def record(self) -> Iterator[tuple[str, str | None]]:
        """Of each file by its RECORD: path below site-packages (may start with ../), and SHA-256 in hex if it has one.

        Raises RigctlError if there is none: half removed, or not from a wheel.
        """
        try:
            text = (self.dist_info / "RECORD").read_text()
        except FileNotFoundError:
            raise RigctlError(
                f"{self.dist_info}: no RECORD, so its files cannot be proved; install {self.name} again"
            ) from None
        for path, hashed, *_ in filter(None, csv.reader(text.splitlines())):
            algorithm, _, digest = hashed.partition("=")
            if hashed and algorithm != "sha256":
                raise RigctlError(f"{self.dist_info}/RECORD: {path}: {algorithm} instead of sha256")
            yield path, base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex() or None


def normalised(name: str) -> str:
    """Distribution name in the form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(environment: Path) -> Path:
    """The one site-packages of a virtual environment; `RigctlError` if there is none or more than one."""
    found = sorted(environment.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise RigctlError(
            f"{environment}: {len(found)} directories lib/python3.*/site-packages, expected one; "
            "name a virtual environment"
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


def recorded(site: Path, paths: set[str]) -> dict[str, str | None]:
    """SHA-256 of some paths as RECORD files say; of two owners the later one by name."""
    digests: dict[str, str | None] = {}
    for distribution in distributions(site):
        record = distribution.dist_info / "RECORD"
        # Most RECORDs name none of the paths: parsing them all would take a second.
        if record.exists() and any(path in record.read_text() for path in paths):
            digests |= {path: digest for path, digest in distribution.record() if path in paths}
    return digests
