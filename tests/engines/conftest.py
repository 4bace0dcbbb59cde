"""Real engine environments, installed from their locks by uv.

`KIMI_RIG_ENGINES_DIR`: where they and uv's cache are kept between runs (default: a temporary directory that
is removed). `KIMI_RIG_ENGINES`: the only releases to use, separated by blanks (default: all, about 50 GB).
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

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "files" / "locks"
PATCHES = ROOT / "files" / "patches"
NEEDED_GB = 20
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class Engines:
    """Installs releases on demand; an environment is reused while its lock is the same."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def environment(self, lock: Path) -> Path:
        """The environment of a lock file, complete and without patches of an earlier run."""
        digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:8]
        path = self.root / f"{lock.stem}-{digest}"
        done = path / "complete"
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)
            self._uv("venv", "--python", PYTHON, str(path), needed_gb=NEEDED_GB)
            # --compile-bytecode: five probes of one engine cost more without it.
            sync = ("pip", "sync", "--compile-bytecode", "--require-hashes", "--python", f"{path}/bin/python")
            self._uv(*sync, str(lock), needed_gb=NEEDED_GB)
            done.touch()
        return path

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


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if kept := os.environ.get("KIMI_RIG_ENGINES_DIR"):
        yield Engines(Path(kept))
        return
    root = tmp_path_factory.mktemp("engines")
    yield Engines(root)
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
