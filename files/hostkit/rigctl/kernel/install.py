"""The wheel in the engine's environment: put there last, proved file by file, and taken out again in one step."""

import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rigctl import site_settings
from rigctl.contract.kernel_job import KernelJob
from rigctl.engines import drift
from rigctl.engines.installed import distributions, interpreter, normalised, site_packages
from rigctl.errors import RigctlError
from rigctl.kernel import toolchain

RECORD = drift.KERNEL_RECORD
PROC = Path("/proc")


@dataclass(frozen=True)
class WheelFile:
    """One file of a wheel: path below site-packages and SHA-256."""

    path: str
    sha256: str


def wheel_name(wheel: Path) -> tuple[str, str]:
    """Normalised name and version, from the file name (PEP 427)."""
    name, version = wheel.name.split("-")[:2]
    return normalised(name), version


def wheel_files(wheel: Path) -> list[WheelFile]:
    """What its RECORD lists."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
    return [WheelFile(row[0], _hex(row[1])) for row in rows if len(row) > 1 and row[1]]


def _hex(hashed: str) -> str:
    raw = hashed.partition("=")[2]
    return base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()


def name_parts(wheel: Path) -> list[str]:
    """How the names of a wheel's files begin, whatever its version: ["sgl_kernel/", "sgl_kernel-"]."""
    distribution = wheel.name.partition("-")[0] + "-"
    tops = {file.path.partition("/")[0] + "/" for file in wheel_files(wheel) if "/" in file.path}
    return [*sorted(top for top in tops if not top.startswith(distribution)), distribution]


def differs(wheel: Path, site: Path) -> str | None:
    """The first file that is not as in the wheel; None when all are. Reads every byte."""
    for file in wheel_files(wheel):
        path = site / file.path
        if not path.is_file():
            return f"{file.path} is missing"
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                return f"{file.path} is another"
    return None


def record(job: KernelJob) -> dict[str, Any]:
    """What we last put in: {"digest", "package", "version"}; empty where we did not."""
    try:
        found: dict[str, Any] = json.loads((job.engine.path / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found


def write_record(job: KernelJob, **what: Any) -> None:
    """Written last: what it says is there is whole."""
    scratch = job.engine.path / f"{RECORD}.new"
    scratch.write_text(json.dumps(what, indent=2) + "\n")
    scratch.replace(job.engine.path / RECORD)


def users(environment: Path, proc: Path = PROC) -> list[int]:
    """Processes that have files of an environment mapped: they would get a mixture of two builds."""
    mapped = f"{environment}/".encode()
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mapped in (entry / "maps").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def check_free(job: KernelJob) -> None:
    """Raises RigctlError while an engine runs from the environment."""
    if pids := users(job.engine.path):
        raise RigctlError(
            f"{job.engine.path} is in use (process {', '.join(map(str, pids[:5]))}): stop the engine, then deploy "
            f"again to install its {job.package}"
        )


def check_version(job: KernelJob, wheel: Path) -> None:
    """Raises RigctlError for a wheel that the engine's own version check would refuse."""
    name, version = wheel_name(wheel)
    if name != normalised(job.package):
        raise RigctlError(f"{wheel.name} is {name}, not {job.package}: correct the kernel's package or source")
    locked = drift.read_lock(job.engine.lock.read_text()).get(name)
    if locked is not None and _public(version) != _public(locked):
        raise RigctlError(
            f"{wheel.name} is version {version}, the release's lock has {locked}, which the engine checks for: "
            "name the commit of that version"
        )


def _public(version: str) -> str:
    return version.partition("+")[0]


def try_import(job: KernelJob, wheel: Path) -> None:
    """Import the module from the wheel, with the engine's torch, before anything is installed. Raises RigctlError."""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so*"))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        if not has_driver():
            stub = Path(folder) / ".driver"
            stub.mkdir()
            functions = sorted({name for library in libraries for name in driver_functions(library)})
            text = "".join(f"int {name}() {{ return 100; }}\n" for name in functions or ["cuInit"])
            toolchain.compile_library(text, stub / "libcuda.so.1", "libcuda.so.1")
            environment["LD_LIBRARY_PATH"] = str(stub)
        done = subprocess.run(
            [interpreter(job.engine.path), "-c", f"import torch, {job.module}"],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RigctlError(f"{wheel.name} cannot be imported and is not installed: {last}")


def has_driver() -> bool:
    """Whether the loader finds the driver's library."""
    done = subprocess.run(["ldconfig", "-p"], capture_output=True, errors="replace", check=False)
    return "libcuda.so.1 " in done.stdout or "libcuda.so.1" in os.environ.get("LD_PRELOAD", "")


def driver_functions(library: Path) -> Iterator[str]:
    """Functions of the driver (cu...) that a library needs from elsewhere."""
    done = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, errors="replace", check=False)
    yield from re.findall(r"\bU (cu[A-Z]\w*)", done.stdout)


def install(job: KernelJob, wheel: Path, digest: str) -> None:
    """Put the wheel in, no other package touched; the record of it is written last. Raises RigctlError."""
    check_version(job, wheel)
    check_free(job)
    try_import(job, wheel)
    name, version = wheel_name(wheel)
    known = {"package": name, "version": version, "mode": "source", "parts": name_parts(wheel)}
    # Killed from here on, it is unfinished, and known to be the kernel library's.
    write_record(job, digest=None, **known)
    before = _others(job)
    # Without uv's cache: its copy is a hard link of what is installed, and whoever edited that edited both.
    options = ["--no-deps", "--offline", "--no-index", "--no-cache", f"--reinstall-package={job.package}"]
    _uv(job, "install", *options, str(wheel))
    site = site_packages(job.engine.path)
    if (what := differs(wheel, site)) is not None:
        raise RigctlError(f"{job.engine.path}: {job.package} is not as its wheel after the installation: {what}")
    if (after := _others(job)) != before:
        raise RigctlError(f"{job.engine.path}: other packages changed: {sorted(before ^ after)}")
    _prove(job, {name: version})
    write_record(job, digest=digest, **known)
    print(f"{wheel.name} is installed in {job.engine.path}", flush=True)


def restore(job: KernelJob) -> None:
    """The stock wheel of the release's lock, or nothing where the lock has none. Raises RigctlError."""
    check_free(job)
    entry = lock_entry(job.engine.lock.read_text(), normalised(job.package))
    if known := record(job):
        write_record(job, **{**known, "digest": None})
    if entry is None:
        if any(each.name == normalised(job.package) for each in distributions(site_packages(job.engine.path))):
            _uv(job, "uninstall", job.package)
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirement:
            requirement.write(entry)
            requirement.flush()
            options = ["--no-deps", "--require-hashes", f"--reinstall-package={job.package}"]
            _uv(job, "install", *options, "--requirements", requirement.name)
    (job.engine.path / RECORD).unlink(missing_ok=True)
    _prove(job, {})
    print(f"{job.engine.path}: {job.package} is the lock's" if entry else f"{job.package} is removed", flush=True)


def lock_entry(lock: str, package: str) -> str | None:
    """The lines of a lock file that pin one package, with its hashes. Pure."""
    found = re.search(rf"^{re.escape(package)}==(?:.*\\\n)*.*$", lock, re.MULTILINE)
    return f"{found[0]}\n" if found else None


def _prove(job: KernelJob, kernel: dict[str, str]) -> None:
    """Bring the notes of `rigctl drift` up to date: every file is as some wheel or our series says."""
    expected = drift.Expected(
        site_packages(job.engine.path),
        job.engine.path / drift.STAMP,
        job.engine.lock,
        job.engine.patches,
        kernel=kernel,
    )
    drift.prove(expected)


def _others(job: KernelJob) -> set[tuple[str, str]]:
    site = site_packages(job.engine.path)
    return {(each.name, each.version) for each in distributions(site) if each.name != normalised(job.package)}


def _uv(job: KernelJob, action: str, *arguments: str) -> None:
    uv = Path(sys.executable).parent / "uv"
    command = [
        str(uv) if uv.exists() else "uv",
        "pip",
        action,
        "--quiet",
        "--python",
        str(interpreter(job.engine.path)),
    ]
    if action == "install":
        command += ["--compile-bytecode", "--no-build", "--link-mode=hardlink"]
    cache = {"UV_CACHE_DIR": str(job.root.parent / ".cache"), "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(
        [*command, *arguments],
        env={**site_settings.announced("uv"), **cache},
        capture_output=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise RigctlError(f"{job.engine.path}: uv pip {action} {job.package} failed: {done.stderr.strip()}")
