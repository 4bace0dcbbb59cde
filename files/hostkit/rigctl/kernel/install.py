"""The wheel in the engine's environment: put there last, proved file by file, and taken out again in one step.

The builder unpacks and imports it (rigctl/builder.py); root moves what it has checked into the environment.
"""

import base64
import contextlib
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rigctl import builder, site_settings
from rigctl.contract.kernel_job import KernelJob
from rigctl.engines import drift
from rigctl.engines.environment import BUILDERS_CACHE
from rigctl.engines.installed import Distribution, distributions, interpreter, normalised, site_packages
from rigctl.errors import RigctlError
from rigctl.kernel import toolchain
from rigctl.whole_files import read_object, write_json

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
    return read_object(job.engine.path / RECORD) or {}


def write_record(job: KernelJob, **what: Any) -> None:
    """Written last: what it says is there is whole."""
    write_json(job.engine.path / RECORD, what)


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
    """Import the module from the wheel, with the engine's torch, before anything is installed. As the builder. Raises
    RigctlError."""
    builder.inside()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
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
    """Put a wheel of the store in, no other package touched; the record of it is written last. Raises RigctlError.

    It has been imported by the builder (`try_import`).
    """
    name, version = wheel_name(wheel)
    known = {"package": name, "version": version, "mode": "source", "parts": name_parts(wheel)}
    # Without uv's cache: its copy is a hard link of what is installed, and whoever edited that edited both.
    options = ["--offline", "--no-index", "--no-cache", str(wheel)]
    with _unpacked(job, *options) as tree:
        if (what := differs(wheel, tree)) is not None:
            raise RigctlError(f"{wheel.name} is not what was unpacked of it: {what}")
        # Killed from here on, it is unfinished, and known to be the kernel library's.
        write_record(job, digest=None, **known)
        _exchange(job, tree)
    _prove(job, {name: version})
    write_record(job, digest=digest, **known)
    print(f"{wheel.name} is installed in {job.engine.path}", flush=True)


def restore(job: KernelJob) -> None:
    """The stock wheel of the release's lock, or nothing where the lock has none. Raises RigctlError."""
    check_free(job)
    entry = lock_entry(job.engine.lock.read_text(), normalised(job.package))
    if entry is None:
        _mark_unfinished(job)
        _exchange(job, None)
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=job.root) as requirement:
            requirement.write(entry)
            requirement.flush()
            Path(requirement.name).chmod(0o644)
            options = ["--require-hashes", "--requirements", requirement.name]
            with _unpacked(job, *options, network=True) as tree:
                _mark_unfinished(job)
                _exchange(job, tree)
    (job.engine.path / RECORD).unlink(missing_ok=True)
    _prove(job, {})
    print(f"{job.engine.path}: {job.package} is the lock's" if entry else f"{job.package} is removed", flush=True)


def _mark_unfinished(job: KernelJob) -> None:
    if known := record(job):
        write_record(job, **{**known, "digest": None})


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


@contextmanager
def _unpacked(job: KernelJob, *options: str, network: bool = False) -> Iterator[Path]:
    """One package as uv unpacks it, root's by then, in a directory that goes with the block. Raises RigctlError.

    uv is given no environment: it would run the environment's Python, and with it what packages put into *.pth files.
    """
    tree = job.engine.path.parent / ".unpacked"  # on the environment's file system
    shutil.rmtree(tree, ignore_errors=True)
    builder.handed_over(tree)
    command: list[str | Path] = [
        Path(sys.executable).parent / "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build",
    ]
    command += ["--python", f"/usr/bin/python{job.engine.python}", "--target", tree, "--compile-bytecode", *options]
    cache = builder.handed_over(job.root.parent / ".cache" / BUILDERS_CACHE)
    site = {name: value for name, value in site_settings.announced("uv").items() if name.startswith("UV_")}
    found = re.split(r"[\s,]+", site.get("UV_FIND_LINKS", ""))
    settings = {**site, "UV_CACHE_DIR": str(cache), "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    try:
        with builder.sandboxed(
            command,
            unit=f"unpack-{job.package}",
            writes=[tree, cache],
            reads=[Path(path) for path in found if path],
            network="any" if network else "none",
            environment=settings,
        ) as words:
            done = subprocess.run(words, capture_output=True, errors="replace", check=False)
        if done.returncode != 0:
            raise RigctlError(f"{job.engine.path}: {job.package} could not be unpacked: {done.stderr.strip()}")
        builder.publish(tree)
        yield tree
    finally:
        shutil.rmtree(tree)


def _exchange(job: KernelJob, tree: Path | None) -> None:
    """Take the package out of the environment and put in what `tree` holds. Raises RigctlError.

    Killed in between, it is done again: what names its files goes last and comes first.
    """
    site, package = site_packages(job.engine.path), normalised(job.package)
    for each in distributions(site):
        if each.name == package:
            _removed(job.engine.path, site, each)
    places = sorted(tree.iterdir() if tree else [], key=lambda place: place.suffix != ".dist-info")
    for place in [place for place in places if not place.name.startswith(".")]:
        there = site / place.name
        if os.path.lexists(there):
            theirs = (path for each in distributions(site) if each.name != package for path, _ in each.record())
            if any(path.partition("/")[0] == place.name for path in theirs):
                raise RigctlError(f"{there} is of another package: a wheel of {job.package} may not bring it")
            if there.is_dir():
                shutil.rmtree(there)  # of an installation that was cut short
        place.rename(there)


def _removed(environment: Path, site: Path, package: Distribution) -> None:
    """Remove the files that its RECORD names, in the environment alone, and directories that are empty then."""
    folders = set()
    for path, _ in package.record() if (package.dist_info / "RECORD").exists() else ():
        place = Path(os.path.normpath(site / path))
        if not place.is_relative_to(environment):
            raise RigctlError(
                f"{package.dist_info}/RECORD names {path}, which is outside the environment: build it anew"
            )
        if place.parent != package.dist_info:
            place.unlink(missing_ok=True)
            folders |= {each for each in place.parents if each.is_relative_to(site) and each != site}
    for folder in sorted(folders, key=lambda each: -len(each.parts)):
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds another package's files, or is gone
            folder.rmdir()
    shutil.rmtree(package.dist_info)
