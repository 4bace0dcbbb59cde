"""Our patch series on an installed engine: does it fit, is it there, put it in place.

A series fits only the exact bytes that the wheel's RECORD names. Files are replaced, never written to: the
installer hard-links them with its cache and with other environments. An environment is built whole or not at all
(environment.py), so nothing here takes a half-done series back.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rigctl.contract.run_specification import RunSpecification
from rigctl.engines.installed import recorded, site_packages
from rigctl.engines.patch_series import FilePatch, MismatchError, Patch, patched, read_series
from rigctl.errors import RigctlError

State = Literal["applies", "already there", "conflicts"]
FileState = Literal["pristine", "ours", "conflicts", "missing"]


@dataclass(frozen=True)
class FileReport:
    """One file: state, SHA-256 on disk and by RECORD, why it conflicts, the bytes it should get."""

    path: str
    state: FileState
    digest: str | None
    pristine_digest: str | None
    reason: str | None = None
    patched: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Report:
    """State of a whole series. `origin`: whose the feature is when already there ("ours" or "native")."""

    state: State
    origin: str | None
    files: tuple[FileReport, ...]
    reason: str | None = None

    def conflict(self) -> str:
        """What is wrong, for a person."""
        reasons = [f"{each.path}: {each.reason}" for each in self.files if each.reason]
        return "\n  ".join([self.reason or "the series does not fit", *reasons])


def _fold(content: bytes, parts: Sequence[FilePatch], *, reverse: bool = False) -> bytes:
    for part in reversed(parts) if reverse else parts:
        content = patched(content, part.hunks, reverse=reverse)
    return content


def examine(site: Path, series: Path) -> Report:
    """State of the series in this site-packages; reads only."""
    patches = read_series(series)
    parts: dict[str, list[FilePatch]] = {}
    for patch in patches:
        for part in patch.files:
            parts.setdefault(part.path, []).append(part)
    digests = recorded(site, set(parts))
    files = tuple(_examine_file(site, path, of_file, digests.get(path)) for path, of_file in parts.items())
    state, origin, reason = _verdict(site, patches, files)
    return Report(state, origin, files, reason)


def _examine_file(site: Path, path: str, parts: Sequence[FilePatch], pristine: str | None) -> FileReport:
    try:
        content = (site / path).read_bytes()
    except FileNotFoundError:
        return FileReport(path, "missing", None, pristine, "not installed")
    digest = hashlib.sha256(content).hexdigest()
    if pristine is None:
        return FileReport(path, "conflicts", digest, None, "no RECORD names it, so its pristine state is not known")
    try:
        wanted = _fold(content, parts)
        reason = "was edited: it is not the wheel's file, though the hunks fit"
    except MismatchError as mismatch:
        wanted, reason = None, str(mismatch)
    if digest == pristine:
        if wanted is None:
            return FileReport(path, "conflicts", digest, pristine, reason)
        return FileReport(path, "pristine", digest, pristine, patched=wanted)
    with contextlib.suppress(MismatchError):
        if hashlib.sha256(_fold(content, parts, reverse=True)).hexdigest() == pristine:
            return FileReport(path, "ours", digest, pristine)
        reason = "was edited: it has our hunks, and other changes"
    return FileReport(path, "conflicts", digest, pristine, f"not the wheel's file; {reason}")


def _verdict(site: Path, patches: Sequence[Patch], files: Sequence[FileReport]) -> tuple[State, str | None, str | None]:
    """State, origin and reason of the whole; the tree's own feature only counts where no file was edited."""
    states = {each.state for each in files}
    if states <= {"ours"}:
        return "already there", "ours", None
    if all(each.digest in (None, each.pristine_digest) for each in files):
        native = [patch.is_native(site) for patch in patches]
        if all(native):
            return "already there", "native", None
        if any(native):
            names = ", ".join(patch.name for patch, is_native in zip(patches, native, strict=True) if is_native)
            return "conflicts", None, f"this release has part of the feature itself ({names})"
    if states <= {"ours", "pristine"}:
        return "applies", None, None
    return "conflicts", None, None


def apply(site: Path, series: Path) -> tuple[Report, list[str]]:
    """Put the series in place; returns the state before it and the files changed (none if it was there).

    Raises RigctlError, with nothing changed, on a conflict.
    """
    report = examine(site, series)
    if report.state == "conflicts":
        raise RigctlError(f"{series}: nothing changed in {site}:\n  {report.conflict()}")
    changes = {
        each.path: each.patched for each in report.files if report.state == "applies" and each.patched is not None
    }
    for path, content in changes.items():
        _replace(site / path, content)
    return report, sorted(changes)


def _replace(path: Path, content: bytes) -> None:
    """Give a file new content as a new inode, and its old bytecode away: that of the kind "unchecked" outlives it."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()
    mode = path.stat().st_mode & 0o7777
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode)


def precheck(specification: RunSpecification) -> str:
    """Pre-check of a serving unit: the engine has its series. Raises RigctlError when it has not."""
    if specification.series is None:
        return "this release needs none"
    environment, series = Path(specification.environment_path), Path(specification.series)
    report = examine(site_packages(environment), series)
    if report.state != "already there":
        pristine = [each.path for each in report.files if each.state == "pristine"]
        why = f"unpatched: {', '.join(pristine)}" if report.state == "applies" else report.conflict()
        raise RigctlError(
            f"{environment} has not the series {series}: {why}; remove {environment}/kimi-rig.json and deploy again, "
            "which builds it anew"
        )
    return f"{len(report.files)} files are {report.origin}"
