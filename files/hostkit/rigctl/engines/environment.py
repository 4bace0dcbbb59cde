"""`rigctl environment build`: make one engine environment from its lock, whole or not at all.

Environments do not move (scripts hold their path), so one is built in its final place and counts only once its stamp,
written last, is there. A half-made one is made anew.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rigctl.engines import drift, patches
from rigctl.engines.installed import site_packages
from rigctl.errors import RigctlError

STAMP = "kimi-rig.json"
# What it was made from, kept in it: it can be proved when the host's locks and patches are of another state.
LOCK = "kimi-rig.lock.txt"
SERIES = "kimi-rig.patches"
BUILD_LOCK = ".lock"
"""Beside the environments of a release."""


@dataclass(frozen=True)
class Specification:
    """What to build.

    series: directory of the patches to apply. index: where packages come from that the default index lacks
    ({"url", "packages"}). wheels: directory that has every wheel of the lock; no index is asked then.
    """

    path: Path
    python: str
    lock: Path
    series: Path | None
    cache: Path
    index: dict[str, Any] | None
    wheels: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Specification:
        """Raises RigctlError."""
        try:
            data = json.loads(text)
            series = Path(data["series"]) if data["series"] else None
            wheels = Path(data["wheels"]) if data.get("wheels") else None
            path, lock, cache = Path(data["path"]), Path(data["lock"]), Path(data["cache"])
            return cls(path, data["python"], lock, series, cache, data["index"], wheels)
        except (ValueError, TypeError, KeyError) as error:
            raise RigctlError(f"not the specification of an environment: {error!r}; the deploy writes it") from None


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("environment", help="build an engine environment from its lock")
    actions = parser.add_subparsers(dest="action", required=True)
    build_parser = actions.add_parser("build")
    build_parser.add_argument("specification", help="JSON: path, python, lock, series, cache, index, wheels")
    build_parser.set_defaults(run=lambda arguments: build(Specification.parse(arguments.specification)))


def build(specification: Specification) -> int:
    """Build the environment. Raises RigctlError with the installer's own words when it cannot be built."""
    path = specification.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / BUILD_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / STAMP).exists():
            print(f"{path} is complete")
            return 0
        if path.exists():
            print(f"{path} is half-made: making it anew")
            shutil.rmtree(path)
        started = time.time()
        try:
            _install(specification)
            _patch(specification)
            _prove(specification)
            _stamp(specification, started)
        except BaseException as error:
            # Of no use to anyone, and on a full disk in everyone's way.
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, OSError):
                raise RigctlError(
                    f"{error.filename or path}: {error.strerror}; {path} was not made and nothing uses it. "
                    "Mend the cause and deploy again"
                ) from None
            raise
    print(f"{path} is complete after {time.time() - started:.0f} s")
    return 0


def _install(specification: Specification) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    interpreter = str(specification.path / "bin" / "python")
    print(f"making {specification.path}", flush=True)
    _run(
        [uv, "venv", "--quiet", "--python", f"/usr/bin/python{specification.python}", str(specification.path)],
        specification,
    )
    print(
        f"installing {len(drift.read_lock(specification.lock.read_text()))} packages of {specification.lock.name}",
        flush=True,
    )
    sync = [uv, "pip", "sync", "--python", interpreter, "--require-hashes", "--link-mode", "hardlink"]
    sync += ["--compile-bytecode", "--no-build", *_index_options(specification), str(specification.lock)]
    _run(sync, specification)


def _patch(specification: Specification) -> None:
    if specification.series is None:
        return
    report, changed = patches.apply(site_packages(specification.path), specification.series)
    print(f"patches of {specification.series}: {report.state}, {len(changed)} files changed", flush=True)


def _prove(specification: Specification) -> None:
    """Every file as its wheel or our series says; the record is what later quick checks compare with."""
    print("proving every file", flush=True)
    expected = drift.Expected(
        site_packages(specification.path), specification.path / drift.STAMP, specification.lock, specification.series
    )
    findings = [each for each in drift.record(expected) if each.severity == "drift"]
    if findings:
        named = "; ".join(f"{each.where}: {each.what}" for each in findings[:5])
        raise RigctlError(f"{specification.path}: {len(findings)} files or packages are not what was locked: {named}")


def _run(command: list[str], specification: Specification) -> None:
    environment = {
        **os.environ,
        "UV_CACHE_DIR": str(specification.cache),
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        print(result.stdout, file=sys.stderr)
        raise RigctlError(
            f"{specification.path}: {command[1]} {command[2]} failed (above); it was not made and nothing uses it. "
            "Mend the cause (network, index, disk, a wrong hash in the lock) and deploy again"
        )


def _index_options(specification: Specification) -> list[str]:
    """The extra index, unless a local wheel directory already holds what it is needed for; no index with all wheels."""
    if specification.wheels is not None:
        return ["--no-index", "--find-links", str(specification.wheels)]
    index = specification.index
    if index is None:
        return []
    wheels = [path.name for folder in _wheel_directories() for path in folder.glob("*.whl")]
    needed = [wheel for package in index["packages"] if (wheel := _locked_wheel(specification.lock, package))]
    if all(any(name.startswith(wheel) for name in wheels) for wheel in needed):
        return []
    return ["--extra-index-url", index["url"], "--index-strategy", "unsafe-best-match"]


def _wheel_directories() -> list[Path]:
    return [Path(word) for word in re.split(r"[\s,]+", os.environ.get("UV_FIND_LINKS", "")) if word]


def _locked_wheel(lock: Path, package: str) -> str | None:
    """The start of the wheel's file name that the lock pins for `package`."""
    version = drift.read_lock(lock.read_text()).get(package)
    return f"{package.replace('-', '_')}-{version}-" if version else None


def _stamp(specification: Specification, started: float) -> None:
    shutil.copyfile(specification.lock, specification.path / LOCK)
    if specification.series is not None:
        shutil.copytree(specification.series, specification.path / SERIES)
    stamp = specification.path / STAMP
    content = {"lock": specification.lock.name, "python": specification.python, "built": int(time.time())}
    content["seconds"] = round(time.time() - started)
    temporary = stamp.with_suffix(".new")
    temporary.write_text(json.dumps(content) + "\n")
    os.sync()
    temporary.rename(stamp)
