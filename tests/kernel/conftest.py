"""The stand-in package on this computer: `rigctl kernel` with the real toolchain, without systemd.

KIMI_RIG_KERNEL_DIR keeps the downloaded parts (toolchain 0.4 GB, torch 0.8 GB) and ccache between runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rigctl import builder
from rigctl.contract.kernel_job import KernelJob
from rigctl.engines.drift import read_lock
from rigctl.kernel import build, toolchain
from rigctl.kernel.requirements import installed
from rigctl.kernel.store import Stored
from tests.kernel.stored import stored
from tests.support import box
from tests.support.unconfined import RIGCTL
from tests.unit.wheelhouse import lock_text, wheel

HERE = Path(__file__).parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
UV = str(Path(sys.executable).parent / "uv")
VERSION = "1.2.3"
TREES = ("mathlib", "shapes", "table", "inner")
OTHERS = ["common_ops_sm90_build", "flash_ops"]


@dataclass(frozen=True)
class Parts:
    """What all tests share: an engine's environment with torch, tools, a compiler cache, a stock wheel."""

    root: Path
    engine: Path
    lock: Path
    stock: Path
    tools: Path
    tools_lock: Path


@pytest.fixture(scope="session", autouse=True)
def without_sandbox() -> None:
    """There is no systemd here; tests/kernel/test_box.py has one."""
    builder.unconfined()


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    missing = [name for name in ("g++", "ccache", "git") if shutil.which(name) is None]
    missing += [] if installed(["libnuma-dev"]) else ["libnuma-dev"]
    assert not missing, f"apt-get install {' '.join(missing)}"
    kept = os.environ.get("KIMI_RIG_KERNEL_DIR")
    root = Path(kept) if kept else tmp_path_factory.mktemp("kernel")
    engine = root / "env" / "engine" / "0123456789ab"
    release = box.CATALOG.releases[box.RELEASE]
    torch = read_lock((ROOT / release.lock.format(python=PYTHON.replace(".", ""))).read_text())["torch"]
    if not (engine / "complete").exists():
        run([UV, "venv", "-q", "--clear", "--python", f"/usr/bin/python{PYTHON}", str(engine)])
        assert release.index is not None
        index = ["--extra-index-url", release.index.url] if not os.environ.get("PIP_FIND_LINKS") else []
        found = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
        run(
            [UV, "pip", "install", "-q", "--python", f"{engine}/bin/python", *index, f"torch=={torch}", "numpy"],
            **found,
        )
        (engine / "complete").touch()
    stock = wheel(root / "stock", "rig-kernel", VERSION, {"rig_kernel/__init__.py": "stock = True\n"})
    frozen = run([UV, "pip", "freeze", "-q", "--exclude", "rig-kernel", "--python", f"{engine}/bin/python"])
    lock = root / "engine.txt"
    lock.write_text(frozen + lock_text(stock))
    tools_lock = ROOT / f"files/locks/kernel-cu130-cp{PYTHON.replace('.', '')}.txt"
    return Parts(root, engine, lock, stock, root / "env" / "toolchain" / "cu130", tools_lock)


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def dependencies(root: Path) -> dict[str, Any]:
    """All that the package would fetch, below `root`."""
    return {
        "repo-mathlib": {"path": str(root / "mathlib"), "private": True},
        "repo-shapes": {"path": str(root / "shapes"), "nested": {"ext/table": str(root / "table")}},
        "repo-inner": {"path": str(root / "inner")},
    }


@dataclass
class Bench:
    """One host: a source of its own, a store, and the stock wheel in the engine's environment."""

    parts: Parts
    root: Path
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        return self.root / "source"

    def content(self) -> dict[str, Any]:
        """The specification: the whole package for 12.0, as the catalogue would say it."""
        return {
            "format": 1,
            "mode": "source",
            "engine": {"path": str(self.parts.engine), "python": PYTHON, "lock": str(self.parts.lock)},
            "package": "rig-kernel",
            "module": "rig_kernel",
            "libraries": ["rig_kernel/sm100/common_ops*.so"],
            "toolchain": {"path": str(self.parts.tools), "lock": str(self.parts.tools_lock)},
            "root": str(self.root / "kernels"),
            "source": {"kind": "directory", "path": str(self.source)},
            "subdirectory": "kernels",
            "architectures": ["12.0"],
            "drop_targets": OTHERS,
            "dependencies": dependencies(self.root),
            "unused_dependencies": ["repo-extra"],
            "system_packages": ["libnuma-dev"],
            "defines": {"FETCHCONTENT_FULLY_DISCONNECTED": "ON"},
            # The files that need much memory need little but where a test is about that.
            "environment": {"CUDAFLAGS": "-DHEAVY_PERCENT=10"},
            "memory_mib": {"default": 400},
            "minimum_disk_mib": 1,
            **self.changes,
        }

    def small(self) -> None:
        """Only the target without torch's headers: configured in seconds, compiled in two."""
        self.changes |= {
            "drop_targets": ["common_ops_sm90_build", "common_ops_sm100_build"],
            "libraries": ["rig_kernel/*flash_ops*.so"],
        }

    @property
    def spec(self) -> KernelJob:
        return KernelJob.parse(self.content(), "test")

    def start(self, action: str = "ensure", *options: str, **environment: str) -> subprocess.Popen[str]:
        """`rigctl kernel ACTION`; both streams in one."""
        file = self.root / "rig-kernel.json"
        file.write_text(json.dumps(self.content()))
        # A shell's background jobs, and so these tests in one, ignore it, and what they start as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            [*RIGCTL, "kernel", action, str(file), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT / "files/hostkit"), "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rigctl(self, action: str = "ensure", code: int = 0) -> str:
        """What it says, when it ends as it should."""
        process = self.start(action)
        said, _ = process.communicate(timeout=900)
        assert process.returncode == code, said
        return said

    def state(self) -> dict[str, Any]:
        process = self.start("status", "--json")
        said, _ = process.communicate(timeout=60)
        found: dict[str, Any] = json.loads(said)
        assert process.returncode == (0 if found["state"] in ("installed", "wheel") else 1)
        return found

    def receipt(self) -> dict[str, Any]:
        """Of what is installed."""
        found: dict[str, Any] = json.loads(self.rigctl("receipt"))
        return found

    def builder(self) -> build.Build:
        """The build of the present inputs, without installation."""
        toolchain.provide(self.spec)
        chain = toolchain.examine(self.spec)
        return build.Build(self.spec, chain, build.gather(self.spec, chain))

    def built(self, jobs: int) -> Stored:
        """Build the present inputs, without installation."""
        toolchain.provide(self.spec)
        return stored(self.spec, jobs)

    def stored(self) -> list[Path]:
        return sorted((self.root / "kernels" / "store").rglob("*.whl"))

    def imports(self) -> str:
        """What the engine's own Python says of the module, with a driver's stub."""
        stub = toolchain.cuda_root(self.spec) / "lib64" / "stubs"
        code = "import rig_kernel; print(getattr(rig_kernel, 'stock', None) or rig_kernel.scale)"
        return run([f"{self.parts.engine}/bin/python", "-c", code], LD_LIBRARY_PATH=str(stub)).strip()

    def compiled_now(self) -> int:
        """Compilers that the work directories' builds ran so far."""
        logs = (self.root / "kernels" / "work").rglob("compiled.jsonl")
        return sum(len(log.read_text().splitlines()) for log in logs)


@pytest.fixture
def bench(parts: Parts, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(parts, tmp_path)
    shutil.copytree(HERE / "standin", made.source)
    for name in TREES:
        shutil.copytree(HERE / name, tmp_path / name)
    (parts.root / "ccache").mkdir(exist_ok=True)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "ccache").symlink_to(parts.root / "ccache")
    links = {"UV_FIND_LINKS": str(parts.stock.parent)}
    install = [UV, "pip", "install", "-q", "--no-deps", "--reinstall", "--no-cache", "--python"]
    run([*install, f"{parts.engine}/bin/python", str(parts.stock)], **links)
    (parts.engine / "kimi-kernel.json").unlink(missing_ok=True)
    yield made
    shutil.rmtree(tmp_path / "kernels", ignore_errors=True)


def until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines a process says until one has `text`."""
    lines: list[str] = []
    for line in process.stdout or []:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"ended without {text!r}:\n{''.join(lines)}")


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a process and all its descendants at once, as systemd does with a unit."""
    pids, pending = [], [process.pid]
    while pending:
        pid = pending.pop()
        pids.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            pending += map(int, task.read_text().split())
    for pid in pids:
        subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
    process.wait()
    time.sleep(0.5)


@pytest.fixture
def memory_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A memory control group (v1) of this computer with the limit, in MiB, that the test's parameter says."""
    parent = Path("/sys/fs/cgroup/memory")
    if not (parent / "memory.limit_in_bytes").exists() or not os.access(parent, os.W_OK):
        pytest.skip("this computer has no memory controller of cgroup v1 that we may use")
    group = parent / f"kimi-rig-kernel-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(request.param << 20))
    yield group
    time.sleep(0.5)
    group.rmdir()
