"""`rigctl drift`: has an engine's environment changed since it was proved?

`check --full` proves every file against its RECORD and, where nothing has drifted, notes size, time and inode of each;
`check` compares with the notes (a second). Both compare packages with the lock and patched files with the series that
the environment was made from, and look for mixtures that engines die of: FlashInfer's parts of different versions
(vllm#49804, flashinfer#4337), more than one NCCL, packages that overwrite one another (sglang#12723).
"""

import argparse
import hashlib
import json
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.markers import Marker

from rigctl.engines import patches
from rigctl.engines.installed import Distribution, distributions, normalised, site_packages
from rigctl.errors import RigctlError
from rigctl.whole_files import write_whole

STAMP = "rigctl-stamp.json"
# What an environment was made from, kept in it: it can be proved when the host's are of another state.
LOCK = "kimi-rig.lock.txt"
SERIES = "kimi-rig.patches"
KERNEL_RECORD = "kimi-kernel.json"
"""In an environment: the kernel wheel that was put over the lock's (rigctl kernel)."""
KERNELS = {"sgl-kernel", "sglang-kernel"}
CURE = "`rigctl drift check --full` proves the environment and writes it anew"
FLASHINFER = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
# Written by installers and the interpreter, not by a wheel.
BYTECODE = re.compile(r"(^|/)__pycache__/")
RECORD_ERRORS = Path(__file__).with_name("record_errors.toml")
UNRECORDED = re.compile(r"(^|/)__pycache__/|\.dist-info/|^_virtualenv\.(py|pth)$")
PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)(?:\s*;([^\\\n]*))?", re.MULTILINE)

Digests = dict[str, dict[str, str | None]]
Stamp = dict[str, list[int]]


@dataclass(frozen=True)
class Finding:
    """One thing found; a "note" is worth knowing and no reason to stop."""

    kind: str
    where: str
    what: str
    severity: Literal["drift", "note"] = "drift"


# Packages: pure functions of names and versions


def read_lock(text: str) -> dict[str, str]:
    """Name and version of every package that a lock file pins for this interpreter's version and platform."""
    return {
        normalised(name): version
        for name, version, marker in PINNED.findall(text)
        if not marker.strip() or Marker(marker).evaluate()
    }


def compare_packages(installed: Iterable[tuple[str, str]], locked: Mapping[str, str]) -> list[Finding]:
    """Missing and extra packages, other versions, one package twice."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in installed:
        found[name].append(version)
    findings = [
        Finding("package", name, f"installed {len(versions)} times: {', '.join(versions)}")
        for name, versions in found.items()
        if len(versions) > 1
    ]
    findings += [Finding("package", name, "not in the lock") for name in sorted(found.keys() - locked.keys())]
    for name, version in sorted(locked.items()):
        if name not in found:
            findings.append(Finding("package", name, f"missing; the lock has {version}"))
        elif version not in found[name]:
            kind = "kernel" if name in KERNELS else "package"
            findings.append(Finding(kind, name, f"is {found[name][0]}; the lock has {version}"))
    return findings


def flashinfer_parts(installed: Mapping[str, str]) -> list[Finding]:
    """FlashInfer's parts must be of one version (a local part such as +cu129 does not count)."""
    parts = {name: installed[name] for name in FLASHINFER if name in installed}
    if len({version.partition("+")[0] for version in parts.values()}) <= 1:
        return []
    listed = ", ".join(f"{name} {version}" for name, version in parts.items())
    return [Finding("flashinfer", "flashinfer", f"versions disagree: {listed}")]


def nccl_libraries(site: Path) -> list[Finding]:
    """More than one NCCL in the environment."""
    own = sorted({str(path.resolve()) for path in site.glob("*/**/libnccl.so*")})
    return [Finding("nccl", str(site), f"{len(own)} NCCL libraries: {', '.join(own)}")] if len(own) > 1 else []


# Files


def recorded_digests(installed: Iterable[Distribution]) -> Digests:
    """Path -> owner -> SHA-256, from every RECORD; None where it may change (bytecode) or has none."""
    corrected = record_errors()
    digests: Digests = defaultdict(dict)
    for each in installed:
        for path, digest in each.record():
            really = corrected.get((each.name, each.version, path), digest)
            digests[path][each.name] = None if BYTECODE.search(path) else really
    return digests


def record_errors() -> dict[tuple[str, str, str], str]:
    """What files of (package, version, path) really are where a published wheel's RECORD is wrong."""
    known = tomllib.loads(RECORD_ERRORS.read_text())["wrong"]
    return {(each["package"], each["version"], each["path"]): each["sha256"] for each in known}


def files_on_disk(site: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below site-packages without bytecode, with its status."""
    pending = [(site, "")]
    while pending:
        folder, prefix = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                else:
                    yield prefix + entry.name, entry.stat(follow_symlinks=False)


def prove_files(site: Path, digests: Digests, ours: Mapping[str, str]) -> list[Finding]:
    """Hash every recorded file, on all cores; `ours` are files that a series changed, with their digest."""
    paths = [path for path, owners in digests.items() if any(owners.values())]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        actual = dict(zip(paths, pool.map(lambda path: _sha256(site / path), paths), strict=True))
    findings = []
    for path, digest in actual.items():
        owners = digests[path]
        if path in ours and digest == ours[path]:
            continue
        kind = "kernel" if owners.keys() & KERNELS else "file"
        if digest is None:
            findings.append(Finding(kind, path, f"missing; {' and '.join(owners)} put it there"))
        elif digest not in owners.values():
            findings.append(Finding(kind, path, f"is not the file of {' and '.join(owners)}"))
        elif losers := [name for name, recorded in owners.items() if recorded not in (digest, None)]:
            winner = next(name for name, recorded in owners.items() if recorded == digest)
            findings.append(Finding("overlap", path, f"{winner} overwrote that of {', '.join(losers)}", "note"))
    return findings


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def foreign_files(site: Path, digests: Digests) -> list[Finding]:
    """Files that no RECORD names: something was put there by hand."""
    return [
        Finding("file", path, "in no package's RECORD")
        for path, _ in files_on_disk(site)
        if path not in digests and not UNRECORDED.search(path)
    ]


def stamp_of(site: Path) -> Stamp:
    """Size, modification time (ns) and inode of every file."""
    return {path: [each.st_size, each.st_mtime_ns, each.st_ino] for path, each in files_on_disk(site)}


def compare_stamps(before: Stamp, now: Stamp) -> list[Finding]:
    """Files that came, went or were touched since the stamp."""
    changed = {path for path in before.keys() & now.keys() if before[path] != now[path]}
    found = {"gone": before.keys() - now.keys(), "new": now.keys() - before.keys(), "changed": changed}
    return [
        Finding("file", path, f"{how} since it was proved") for how, paths in found.items() for path in sorted(paths)
    ]


# The whole environment


@dataclass(frozen=True)
class Expected:
    """What an environment should be: its lock, the series applied to it, where the stamp lies."""

    site: Path
    stamp: Path
    lock: Path | None = None
    series: Path | None = None
    kernel: Mapping[str, str] | None = None
    """Name and version of the kernel wheel put over the lock's; None: as the environment's own record says."""


def _kernel(expected: Expected) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Name and version of the kernel wheel that was put over the lock's, and how the names of its files begin."""
    if expected.kernel is not None:
        return expected.kernel, ()
    try:
        record = json.loads((expected.site.parents[2] / KERNEL_RECORD).read_text())
        return {record["package"]: record["version"]}, tuple(record.get("parts", ()))
    except (OSError, ValueError, KeyError):
        return {}, ()


def kernel_apart(findings: Iterable[Finding], package: Iterable[str], parts: tuple[str, ...]) -> Iterator[Finding]:
    """The same findings; those on a kernel wheel of ours are notes: a deploy repairs it (`rigctl kernel`)."""
    names = set(package)
    for each in findings:
        if parts and (each.where.startswith(parts) or each.where in names):
            what = f"{each.what} (of the kernel library: `rigctl kernel status`)"
            yield Finding(each.kind, each.where, what, "note")
        else:
            yield each


def inspect(expected: Expected, *, full: bool) -> list[Finding]:
    """All findings; quick mode needs the stamp that `record` wrote."""
    installed = distributions(expected.site)
    pairs = [(each.name, each.version) for each in installed]
    findings: list[Finding] = []
    kernel, parts = _kernel(expected)
    if expected.lock:
        findings += compare_packages(pairs, {**read_lock(expected.lock.read_text()), **kernel})
    findings += flashinfer_parts(dict(pairs))
    findings += nccl_libraries(expected.site)
    patched, ours = _series(expected)
    findings += patched
    if full:
        digests = recorded_digests(installed)
        findings += prove_files(expected.site, digests, ours) + foreign_files(expected.site, digests)
    else:
        findings += compare_stamps(read_stamp(expected.stamp), stamp_of(expected.site))
    return list(kernel_apart(findings, kernel, parts))


def _series(expected: Expected) -> tuple[list[Finding], dict[str, str]]:
    """Findings on the series, and the digests that our patched files rightly have."""
    if not expected.series:
        return [], {}
    report = patches.examine(expected.site, expected.series)
    ours = {each.path: each.digest for each in report.files if each.state == "ours" and each.digest}
    if report.state == "already there":
        return [], ours
    if report.state == "applies":
        pristine = [each.path for each in report.files if each.state == "pristine"]
        return [Finding("patch", path, "without its patch") for path in pristine], ours
    findings = [Finding("patch", each.path, each.reason) for each in report.files if each.reason]
    return findings or [Finding("patch", str(expected.series), report.conflict())], ours


def read_stamp(path: Path) -> Stamp:
    """The stamp; `RigctlError` if it is not there or not readable."""
    try:
        stamp: Stamp = json.loads(path.read_text())["files"]
    except FileNotFoundError:
        raise RigctlError(f"{path}: no stamp; {CURE}") from None
    except (ValueError, KeyError, TypeError):
        raise RigctlError(f"{path}: damaged stamp; {CURE}") from None
    return stamp


def record(expected: Expected) -> list[Finding]:
    """Prove the environment fully; write the stamp only if nothing but notes was found."""
    before = stamp_of(expected.site)
    findings = inspect(expected, full=True)
    if all(each.severity == "note" for each in findings):
        write_whole(expected.stamp, json.dumps({"files": before}))
    return findings


def prove(expected: Expected) -> None:
    """Prove the environment fully and write the stamp. Raises RigctlError that names what is not as it should be."""
    if findings := [each for each in record(expected) if each.severity == "drift"]:
        named = "; ".join(f"{each.where}: {each.what}" for each in findings[:5])
        raise RigctlError(f"{expected.site}: {len(findings)} files or packages are not what was locked: {named}")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 without drift, 1 with."""
    environment: Path = arguments.env
    lock, series = (path if path.exists() else None for path in (environment / LOCK, environment / SERIES))
    expected = Expected(site_packages(environment), environment / STAMP, lock, series)
    findings = record(expected) if arguments.full else inspect(expected, full=False)
    drifted = any(each.severity == "drift" for each in findings)
    if arguments.json:
        report: dict[str, Any] = {"drift": drifted, "findings": [asdict(each) for each in findings]}
        print(json.dumps(report, indent=2))
    else:
        for each in findings:
            print(f"{each.severity}: {each.kind}: {each.where}: {each.what}")
        print(f"{arguments.env}: {'has drifted' if drifted else 'as it was installed'}")
    return 1 if drifted else 0


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `drift` to the command line."""
    parser = subparsers.add_parser("drift", help="has an engine's environment changed?")
    parser.add_argument("action", choices=("check",))
    parser.add_argument("--env", type=Path, required=True, help="virtual environment")
    full = "hash every file; without drift, renew what quick checks compare with"
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)
