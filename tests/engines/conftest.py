"""Real engine environments, installed from their locks by uv.

All tests of one release come together, and it is removed before the next is installed: 20 GB suffice.
`KIMI_RIG_ENGINES_DIR`: keep them and uv's cache there between runs (about 50 GB for all). `KIMI_RIG_ENGINES`: the only
releases to use, separated by blanks; the others are skipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigctl import builder

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "files" / "locks"
PATCHES = ROOT / "files" / "patches"
NEEDED_GB = 20
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="session", autouse=True)
def without_sandbox() -> None:
    """There is no systemd here: engines are asked as whoever tests."""
    builder.unconfined()


class Engines:
    """Installs releases on demand; an environment is reused while its lock is the same."""

    def __init__(self, root: Path, *, keep: bool) -> None:
        self.root, self.keep = root, keep
        root.mkdir(parents=True, exist_ok=True)

    def environment(self, lock: Path) -> Path:
        """The environment of a lock file, complete and without patches of an earlier run."""
        digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:8]
        path = self.root / f"{lock.stem}-{digest}"
        done = path / "complete"
        if not done.exists():
            self._make_room(path)
            self._uv("venv", "--python", PYTHON, str(path), needed_gb=NEEDED_GB)
            # --compile-bytecode: five probes of one engine cost more without it.
            sync = ("pip", "sync", "--compile-bytecode", "--require-hashes", "--python", f"{path}/bin/python")
            self._uv(*sync, str(lock), needed_gb=NEEDED_GB)
            done.touch()
        return path

    def _make_room(self, path: Path) -> None:
        """Remove what is half-made, and other environments with their cache unless all are kept."""
        for other in self.root.iterdir() if not self.keep else [path]:
            shutil.rmtree(other, ignore_errors=True)

    def files_only(self, requirement: str) -> Path:
        """A wheel's files without its dependencies, fresh from uv's cache: enough for patches."""
        path = self.root / f"files-{requirement}"
        shutil.rmtree(path, ignore_errors=True)
        install = ("pip", "install", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON)
        self._uv(*install, "--target", str(path), requirement, needed_gb=5)
        return path

    def _uv(self, *arguments: str, needed_gb: int) -> None:
        free_gb = shutil.disk_usage(self.root).free / 1e9
        if free_gb < needed_gb:
            pytest.fail(f"{self.root}: {free_gb:.0f} GB free, {needed_gb} needed; set KIMI_RIG_ENGINES_DIR")
        command = [shutil.which("uv") or f"{sys.prefix}/bin/uv", "--quiet", *arguments]
        environment = os.environ | {"UV_CACHE_DIR": str(self.root / "cache"), "UV_HTTP_TIMEOUT": "300"}
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
        if done.returncode:
            pytest.fail(f"uv {' '.join(arguments)}:\n{done.stderr[-2000:]}")


ORDER = ("vllm-0.16.0", "sglang-0.5.9", "vllm-0.17.1", "vllm-0.33.0", "sglang-0.5.23")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by the release they need."""

    def rank(item: pytest.Item) -> int:
        name = item.name.replace("==", "-")
        return next((place for place, release in enumerate(ORDER) if f"[{release}" in name), len(ORDER))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if kept := os.environ.get("KIMI_RIG_ENGINES_DIR"):
        yield Engines(Path(kept), keep=True)
        return
    root = tmp_path_factory.mktemp("engines")
    yield Engines(root, keep=False)
    shutil.rmtree(root)


def lock_of(release: str) -> Path:
    """The release's lock for the Python that runs the tests."""
    return LOCKS / f"{release}-cp{PYTHON.replace('.', '')}.txt"


def release_environment(engines: Engines, release: str) -> Path:
    """The environment of a release, or a skip when the run is restricted to others."""
    chosen = os.environ.get("KIMI_RIG_ENGINES", "").split()
    if chosen and release not in chosen:
        pytest.skip(f"{release} is not in KIMI_RIG_ENGINES")
    return engines.environment(lock_of(release))
