"""`rigctl patches`: our patch series against an installed engine: status, apply, unapply.

A series fits only the exact bytes that the wheel's RECORD names. Files are replaced, never written to: the
installer hard-links them with its cache and with other environments.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rigctl.contract.run_specification import RunSpecification
from rigctl.engines.installed import recorded, site_packages
from rigctl.engines.patch_series import FilePatch, MismatchError, Patch, patched, read_series
from rigctl.errors import RigctlError

SCRATCH = ".{}.rigctl-new"

State = Literal["applies", "already there", "conflicts"]
FileState = Literal["pristine", "ours", "conflicts", "missing"]


@dataclass(frozen=True)
class FileReport:
    """One file: state, SHA-256 on disk and by RECORD, who owns it, why it conflicts, bytes it should get."""

    path: str
    state: FileState
    digest: str | None
    pristine_digest: str | None
    owner: str | None
    reason: str | None = None
    patched: bytes | None = field(default=None, repr=False)
    pristine: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Report:
    """State of a whole series. `origin`: whose the feature is when already there ("ours" or "native")."""

    site: Path
    series: Path
    state: State
    origin: str | None
    files: tuple[FileReport, ...]
    reason: str | None = None

    def as_json(self) -> dict[str, object]:
        files = [
            {
                "path": each.path,
                "state": each.state,
                "sha256": each.digest,
                "pristine_sha256": each.pristine_digest,
                "owner": each.owner,
                "reason": each.reason,
            }
            for each in self.files
        ]
        return {
            "site_packages": str(self.site),
            "series": str(self.series),
            "state": self.state,
            "origin": self.origin,
            "reason": self.reason,
            "files": files,
        }

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
    owners = recorded(site, set(parts))
    files = []
    for path, of_file in parts.items():
        owner, entry = owners.get(path, (None, None))
        label = f"{owner.name} {owner.version}" if owner else None
        files.append(_examine_file(site, path, of_file, entry.sha256 if entry else None, label))
    state, origin, reason = _verdict(site, patches, files)
    return Report(site, series, state, origin, tuple(files), reason)


def _examine_file(
    site: Path, path: str, parts: Sequence[FilePatch], pristine_digest: str | None, owner: str | None
) -> FileReport:
    try:
        content = (site / path).read_bytes()
    except FileNotFoundError:
        return FileReport(path, "missing", None, pristine_digest, owner, "not installed")
    digest = hashlib.sha256(content).hexdigest()
    if pristine_digest is None:
        reason = "no RECORD names it, so its pristine state is not known"
        return FileReport(path, "conflicts", digest, None, owner, reason)
    try:
        wanted = _fold(content, parts)
        reason = "was edited: it is not the wheel's file, though the hunks fit"
    except MismatchError as mismatch:
        wanted, reason = None, str(mismatch)
    if digest == pristine_digest:
        if wanted is None:
            return FileReport(path, "conflicts", digest, pristine_digest, owner, reason, pristine=content)
        return FileReport(path, "pristine", digest, pristine_digest, owner, None, wanted, content)
    with contextlib.suppress(MismatchError):
        original = _fold(content, parts, reverse=True)
        if hashlib.sha256(original).hexdigest() == pristine_digest:
            return FileReport(path, "ours", digest, pristine_digest, owner, None, content, original)
        reason = "was edited: it has our hunks, and other changes"
    return FileReport(path, "conflicts", digest, pristine_digest, owner, f"not the wheel's file; {reason}")


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
    """Put the series in place; returns the state after it and the files changed (none if it was there).

    `RigctlError` and nothing changed on a conflict. Completes what a killed run left half done.
    """
    with _exclusive(site):
        report = examine(site, series)
        if report.state == "conflicts":
            raise RigctlError(f"{series}: nothing changed in {site}:\n  {report.conflict()}")
        _sweep(site, report.files)
        if report.state == "already there":
            return report, []
        changes = {each.path: each.patched for each in report.files if each.state == "pristine"}
        _replace_all(site, changes, {each.path: each.pristine for each in report.files})
        return _proved(site, series, "ours", changes)


def unapply(site: Path, series: Path) -> tuple[Report, list[str]]:
    """Put the wheel's bytes back (by RECORD's digest); returns the state after it and the files changed."""
    with _exclusive(site):
        report = examine(site, series)
        if report.state == "conflicts":
            raise RigctlError(
                f"{series}: nothing changed in {site}; to get the wheel's files back, install it again:"
                f"\n  {report.conflict()}"
            )
        _sweep(site, report.files)
        changes = {each.path: each.pristine for each in report.files if each.state == "ours"}
        if not changes:
            return report, []
        _replace_all(site, changes, {each.path: each.patched for each in report.files})
        return _proved(site, series, "pristine", changes)


def _proved(site: Path, series: Path, wanted: FileState, changes: dict[str, bytes | None]) -> tuple[Report, list[str]]:
    after = examine(site, series)
    if wrong := [each.path for each in after.files if each.state != wanted]:
        raise RigctlError(f"{site}: {', '.join(wrong)}: not {wanted} after the change; something else writes there")
    return after, sorted(changes)


@contextlib.contextmanager
def _exclusive(site: Path) -> Iterator[None]:
    """One change at a time in one site-packages."""
    try:
        handle = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RigctlError(f"{site}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _scratch(path: Path) -> Path:
    return path.with_name(SCRATCH.format(path.name))


def _sweep(site: Path, files: Sequence[FileReport]) -> None:
    """Remove what a killed run left beside the files."""
    for each in files:
        _scratch(site / each.path).unlink(missing_ok=True)


def _replace_all(site: Path, changes: dict[str, bytes | None], before: dict[str, bytes | None]) -> None:
    """Replace all files or none: write everything, then rename; a failure takes the renames back."""
    done: list[str] = []
    try:
        for path, content in changes.items():
            _write_beside(site / path, content)
        for path in changes:
            _drop_bytecode(site / path)
            _scratch(site / path).replace(site / path)
            done.append(path)
            _sync_directory((site / path).parent)
    except OSError as error:
        for path in done:
            _write_beside(site / path, before[path])
            _scratch(site / path).replace(site / path)
        for path in changes:
            _scratch(site / path).unlink(missing_ok=True)
        raise RigctlError(f"{error.filename or site}: {error.strerror}; all files are as they were") from error


def _write_beside(path: Path, content: bytes | None) -> None:
    """The new content as a new inode with the old one's mode and owner, durable, not yet in place."""
    if content is None:
        raise FileNotFoundError(errno.ENOENT, "its bytes are not known", str(path))
    status = path.stat()
    scratch = _scratch(path)
    scratch.unlink(missing_ok=True)
    with scratch.open("xb") as handle:
        handle.write(content)
        os.fchmod(handle.fileno(), status.st_mode & 0o7777)
        if os.geteuid() == 0:
            os.fchown(handle.fileno(), status.st_uid, status.st_gid)
        os.fsync(handle.fileno())


def _drop_bytecode(path: Path) -> None:
    """Done before the rename: bytecode of the kind "unchecked" would outlive its source."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0; 1 with a message on a conflict (`status` too)."""
    site: Path = arguments.path or site_packages(arguments.env)
    changed: list[str] = []
    if arguments.action == "status":
        report = examine(site, arguments.series)
    else:
        report, changed = (apply if arguments.action == "apply" else unapply)(site, arguments.series)
    if arguments.json:
        print(json.dumps(report.as_json() | {"changed": changed}, indent=2))
    else:
        print(describe(report, changed))
    return 1 if report.state == "conflicts" else 0


def describe(report: Report, changed: Sequence[str]) -> str:
    """The report for a person: the whole, then one line a file with the first 12 digits of its digest."""
    origin = f" ({report.origin})" if report.origin else ""
    lines = [f"{report.series}: {report.state}{origin}{': ' + report.reason if report.reason else ''}"]
    for each in report.files:
        digest = (each.digest or "-")[:12]
        note = f": {each.reason}" if each.reason and report.state == "conflicts" else ""
        lines.append(f"  {each.path}  {digest}  {each.state if report.origin != 'native' else 'untouched'}{note}")
    if changed:
        lines.append(f"changed: {', '.join(changed)}")
    return "\n".join(lines)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `patches` to the command line."""
    parser = subparsers.add_parser("patches", help="our patches in an installed engine")
    parser.add_argument("action", choices=("status", "apply", "unapply"))
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--env", type=Path, help="virtual environment")
    where.add_argument("--path", type=Path, help="a site-packages or dist-packages that is not ours")
    parser.add_argument("--series", type=Path, required=True, help="directory with *.patch")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)
