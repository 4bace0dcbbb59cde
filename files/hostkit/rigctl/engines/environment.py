"""`rigctl environment build`: make one engine environment from its lock, whole or not at all.

Environments do not move (scripts hold their path), so one is built in its final place and counts only once its stamp,
written last, is there. A half-made one is made anew. The builder fetches and unpacks it (rigctl/builder.py); then it is
made root's, patched and proved.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rigctl import builder, lock_files, site_settings
from rigctl.contract.environment_build import EnvironmentBuild
from rigctl.engines import drift, patches
from rigctl.engines.installed import site_packages
from rigctl.errors import RigctlError
from rigctl.whole_files import write_json

STAMP = "kimi-rig.json"
UNCOMPILED = r"/tests?/|/testing/_internal/|/transformers/models/(?!auto/)"
"""Files without bytecode: a quarter of all source, of which a start imports next to nothing."""
BUILDERS_CACHE = "builder"
"""The builder's part of uv's cache: files that are root's by now are copied from it, others are linked."""
WAIT_SECONDS = 3600
"""For another build: the limit of its job (rig/operations/jobs.py)."""
BUILD_LOCK = ".lock"
"""Beside the environments of a release."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("environment", help="build an engine environment from its lock")
    actions = parser.add_subparsers(dest="action", required=True)
    build_parser = actions.add_parser("build", help="build the environment of an order, whole or not at all")
    build_parser.add_argument("order", help="JSON, as the deploy writes it (rigctl/contract/environment_build.py)")
    build_parser.set_defaults(run=lambda arguments: build(EnvironmentBuild.parse_text(arguments.order, "the order")))


def build(order: EnvironmentBuild) -> int:
    """Build the environment. Raises RigctlError with the installer's own words when it cannot be built."""
    path = order.path
    os.umask(0o022)  # what root makes here others use, whatever the login's is
    path.parent.mkdir(parents=True, exist_ok=True)
    cache = order.cache / BUILDERS_CACHE
    cache.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        what = f"another build has kept {path} waiting for {WAIT_SECONDS} s"
        held.enter_context(lock_files.locked(path.parent / BUILD_LOCK, what, WAIT_SECONDS))
        if (path / STAMP).exists():
            print(f"{path} is complete")
            return 0
        if path.exists():
            print(f"{path} is half-made: making it anew")
            shutil.rmtree(path)
        started = time.time()
        # All builds run as one user: while one is made root's, no other writes into it.
        held.enter_context(lock_files.locked(order.cache / BUILD_LOCK, what, WAIT_SECONDS))
        try:
            _install(order)
            _patch(order)
            _prove(order)
            _stamp(order, started)
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


def _install(order: EnvironmentBuild) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    system, interpreter = f"/usr/bin/python{order.python}", str(order.path / "bin" / "python")
    for directory in (order.path, order.cache / BUILDERS_CACHE):
        builder.handed_over(directory)
    print(f"making {order.path}", flush=True)
    venv = [uv, "venv", "--quiet", "--allow-existing", "--python", system, str(order.path)]
    _run(venv, order, f"a virtual environment of Python {order.python} could not be made")
    packages = f"{len(drift.read_lock(order.lock.read_text()))} packages of {order.lock.name}"
    print(f"installing {packages}", flush=True)
    sync = [uv, "pip", "sync", "--python", interpreter, "--require-hashes", "--link-mode", "copy"]
    sync += ["--no-build", *_index_options(order), str(order.lock)]
    _run(sync, order, f"the {packages} could not be installed")
    # uv would compile with the environment's own Python, which runs what packages put into *.pth files.
    compiling = [
        system,
        "-I",
        "-S",
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        "-x",
        UNCOMPILED,
        str(site_packages(order.path)),
    ]
    _run(compiling, order, None)
    builder.publish(order.path)


def _patch(order: EnvironmentBuild) -> None:
    if order.patches is None:
        return
    report, changed = patches.apply(site_packages(order.path), order.patches)
    print(f"patches of {order.patches}: {report.state}, {len(changed)} files changed", flush=True)


def _prove(order: EnvironmentBuild) -> None:
    """Every file as its wheel or our series says; the record is what later quick checks compare with."""
    print("proving every file", flush=True)
    drift.prove(drift.Expected(site_packages(order.path), order.path / drift.STAMP, order.lock, order.patches))


def _run(command: list[str], order: EnvironmentBuild, failed: str | None) -> None:
    """Run a step as the builder. failed: what it means when it does; None: nothing, as of files that do not compile."""
    environment = {
        **{name: value for name, value in site_settings.announced("uv").items() if name.startswith("UV_")},
        "UV_CACHE_DIR": str(order.cache / BUILDERS_CACHE),
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    with builder.sandboxed(
        command,
        unit=f"env-{order.path.parent.name}-{order.path.name}",
        writes=[order.path, order.cache / BUILDERS_CACHE],
        reads=[*_wheel_directories(), *([order.wheels] if order.wheels else [])],
        network="none" if failed is None or order.wheels else "any",
        environment=environment,
    ) as words:
        result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", check=False)
    if result.returncode != 0 and failed is not None:
        print(result.stdout, file=sys.stderr)
        raise RigctlError(
            f"{order.path}: {failed} (uv's words are above); it was not made and nothing uses it. "
            "Mend the cause (network, index, disk, a wrong hash in the lock) and deploy again"
        )


def _index_options(order: EnvironmentBuild) -> list[str]:
    """The extra index, unless a local wheel directory already holds what it is needed for; no index with all wheels."""
    if order.wheels is not None:
        return ["--no-index", "--find-links", str(order.wheels)]
    index = order.index
    if index is None:
        return []
    wheels = [path.name for folder in _wheel_directories() for path in folder.glob("*.whl")]
    needed = [wheel for package in index.packages if (wheel := _locked_wheel(order.lock, package))]
    if all(any(name.startswith(wheel) for name in wheels) for wheel in needed):
        return []
    return ["--extra-index-url", index.url, "--index-strategy", "unsafe-best-match"]


def _wheel_directories() -> list[Path]:
    return [
        Path(word)
        for word in re.split(r"[\s,]+", site_settings.environment("uv", os.environ)[0].get("UV_FIND_LINKS", ""))
        if word
    ]


def _locked_wheel(lock: Path, package: str) -> str | None:
    """The start of the wheel's file name that the lock pins for `package`."""
    version = drift.read_lock(lock.read_text()).get(package)
    return f"{package.replace('-', '_')}-{version}-" if version else None


def _stamp(order: EnvironmentBuild, started: float) -> None:
    shutil.copyfile(order.lock, order.path / drift.LOCK)
    if order.patches is not None:
        shutil.copytree(order.patches, order.path / drift.SERIES)
    os.sync()
    took = round(time.time() - started)
    content = {"lock": order.lock.name, "python": order.python, "built": int(time.time()), "seconds": took}
    write_json(order.path / STAMP, content)
