"""Figures of engine environments: PYTHONPATH=files/hostkit python -m tests.engines.bench_install CACHE WHAT...

install RELEASE   build on a warm cache (fill it first: the first run is not counted) against `uv pip sync`
disk FIRST SECOND what the second release takes when the first is there
drift RELEASE     quick and full check against `sha256sum` of the same files on all cores
deploy INVENTORY  the engines stage of a deploy that changes nothing

Seconds of wall clock; medians, each next to its least and most. CACHE: a directory for uv's cache and environments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from rig.catalog.entries import ROOT
from rigctl.engines.installed import site_packages

RIGCTL = [sys.executable, "-c", "import sys; from rigctl.cli import main; sys.exit(main(sys.argv[1:]))"]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def timed(command: Sequence[str], **environment: str) -> float:
    """Wall-clock seconds of a command that must succeed."""
    begun = time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False, cwd=ROOT)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return seconds


def repeated(runs: int, **measures: Callable[[], float]) -> dict[str, float]:
    """Medians of measures taken in turn, so that what changes meanwhile meets all of them; prints each."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(runs):
        for name, measure in measures.items():
            found[name].append(measure())
    for name, values in found.items():
        spread = f"({min(values):.2f} to {max(values):.2f}, {runs} runs)"
        print(f"  {name}: median {statistics.median(values):.2f} s {spread}", flush=True)
    return {name: statistics.median(values) for name, values in found.items()}


class Bench:
    """Environments and uv's cache below one directory."""

    def __init__(self, root: Path, runs: int) -> None:
        self.root, self.cache, self.runs = root, root / "cache", runs

    def lock(self, release: str) -> Path:
        return ROOT / f"files/locks/{release}-cp{PYTHON.replace('.', '')}.txt"

    def plain(self, release: str, *options: str) -> float:
        """`uv venv` and `uv pip sync` of the lock, with uv's defaults and these options."""
        path, uv = self.root / "plain", str(Path(sys.executable).parent / "uv")
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        cache = {"UV_CACHE_DIR": str(self.cache)}
        begin = timed([uv, "venv", "--python", f"/usr/bin/python{PYTHON}", str(path)], **cache)
        sync = [uv, "pip", "sync", "--require-hashes", "--python", f"{path}/bin/python", *options]
        return begin + timed([*sync, str(self.lock(release))], **cache)

    def ours(self, release: str, name: str = "ours") -> float:
        """`rigctl environment build`: installed, compiled, patched, every byte proved."""
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        patches = yaml.safe_load((ROOT / "inventory" / "releases.yaml").read_text())[release].get("patches")
        specification = {
            "format": 1,
            "path": str(path),
            "python": PYTHON,
            "lock": str(self.lock(release)),
            "patches": str(ROOT / patches) if patches else None,
            "cache": str(self.cache),
            "index": None,
        }
        return timed([*RIGCTL, "environment", "build", json.dumps(specification)])

    def install(self, release: str) -> None:
        self.ours(release)
        shutil.rmtree(self.root / "ours")
        print(f"install of {release} from a warm cache:")
        medians = repeated(
            self.runs,
            plain=lambda: self.plain(release),
            plain_compiled=lambda: self.plain(release, "--compile-bytecode"),
            ours=lambda: self.ours(release),
        )
        for name in ("plain", "plain_compiled"):
            print(f"  ours / {name}: {medians['ours'] / medians[name]:.2f}")

    def disk(self, first: str, second: str) -> None:
        self.ours(first, "first")
        before = self._bytes("cache", "first")
        self.ours(second, "second")
        extra, alone = self._bytes("cache", "first", "second") - before, self._bytes("second")
        print(f"{second} beside {first}: {extra / 1e9:.2f} GB more, {alone / 1e9:.2f} GB alone: {extra / alone:.0%}")

    def _bytes(self, *names: str) -> int:
        """Bytes on disk, each file once however often it is linked."""
        listing = subprocess.run(
            ["du", "-s", "-B1", "-c", *names], cwd=self.root, capture_output=True, text=True, check=True
        )
        return int(listing.stdout.splitlines()[-1].split()[0])

    def drift(self, release: str) -> None:
        path = self.root / "ours"
        if not path.exists():
            self.ours(release)
        check = [*RIGCTL, "drift", "check", "--env", str(path)]
        site = site_packages(path)
        hashing = (
            f"find {site} -name __pycache__ -prune -o -type f -print0 | xargs -0 -P {os.cpu_count()} -n 64 sha256sum"
        )
        print(f"drift of {release} ({self._bytes('ours') / 1e9:.1f} GB):")
        medians = repeated(
            self.runs,
            quick=lambda: timed(check),
            full=lambda: timed([*check, "--full"]),
            sha256sum=lambda: timed(["sh", "-c", f"{hashing} > /dev/null"]),
        )
        print(f"  full / sha256sum on {os.cpu_count()} cores: {medians['full'] / medians['sha256sum']:.2f}")

    def deploy(self, inventory: str) -> None:
        command = [sys.executable, "-m", "pyinfra", "-y", inventory]
        print("a deploy that changes nothing:")
        repeated(
            self.runs,
            engines_stage=lambda: timed([*command, "tasks/engines.py"]),
            hostkit_stage=lambda: timed([*command, "tasks/hostkit.py"]),
            all_stages=lambda: timed([*command, "deploy.py"]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("what", choices=("install", "disk", "drift", "deploy"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    getattr(Bench(arguments.cache.resolve(), arguments.runs), arguments.what)(*arguments.names)


if __name__ == "__main__":
    main()
