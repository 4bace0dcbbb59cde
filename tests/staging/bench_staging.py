"""Figures of staging and verification, each the median of several runs, on this machine's loopback.

    python -m tests.staging.bench_staging [FIGURE...] [--shards 64] [--shard-bytes N] [--runs 5] [--scratch DIR]

Figures: download, verify, quick, resume; all by default. Needs three times the checkpoint in DIR, and curl, xargs
and sha256sum. Start-up of Python is counted. What each does: curl writes into the page cache and proves nothing; "with
sync" the bytes are also on the disk; "with sync and sha256sum" they are proved as well, as staging does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rig.catalog.entries import ROOT  # also makes rigctl importable
from rigctl.checkpoints import record as records
from rigctl.checkpoints import staging
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sources import open_source
from rigctl.checkpoints.verify import Seen
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import Manifest
from rigctl.whole_files import write_json
from tests.staging import synthetic
from tests.staging.hubserver import COMMIT, REPOSITORY

SEND_BUFFER = 128 << 10  # bytes a connection
FIGURES = ["download", "verify", "quick", "resume"]
HOSTKIT = Path(staging.__file__).parents[2]


class Server:
    """The loopback hub in a process of its own."""

    def __init__(self, root: Path, *options: str) -> None:
        command = [sys.executable, "-m", "tests.staging.hubserver", str(root), *options]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{HOSTKIT}"}
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self.address: str = self._read()["hub"]

    def _read(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def ask(self, word: str) -> int:
        """Bytes sent so far; "reset" forgets them first."""
        assert self._child.stdin is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()
        return int(self._read()["sent"])

    def close(self) -> None:
        """End it."""
        self._child.communicate()


class Host:
    """A state directory and the rigctl command."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.state = records.State(scratch / "state")
        self.destination = scratch / "models" / "tiny"
        self.destination.parent.mkdir(parents=True, exist_ok=True)

    def spec(self, source: dict[str, Any], **keys: Any) -> Path:
        """Write a spec file."""
        content = {
            "format": 1,
            "name": "tiny",
            "destination": str(self.destination),
            "source": source,
            "manifest": str(self.scratch / "manifest.json"),
            "reserve_bytes": 0,
            **keys,
        }
        place = self.scratch / "spec.json"
        place.write_text(json.dumps(content))
        return place

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a rigctl checkpoints command."""
        environment = {**os.environ, "PYTHONPATH": str(HOSTKIT), "RIGCTL_CHECKPOINTS": str(self.state.root)}
        return subprocess.Popen(
            [sys.executable, "-m", "rigctl", "checkpoints", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def run(self, *arguments: str) -> tuple[float, float]:
        """(seconds, peak MB) of a command that must succeed."""
        started = time.monotonic()
        child = self.start(*arguments)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"rigctl checkpoints {' '.join(arguments)} failed ({status})")
        return time.monotonic() - started, usage.ru_maxrss / 1024

    def clear(self) -> None:
        """Forget and remove what was staged; writes of one run must not slow the next."""
        for place in (self.destination, self.destination.parent / ".tiny.partial"):
            if place.exists():
                subprocess.run(["chmod", "-R", "u+w", place], check=True)
                shutil.rmtree(place)
        self.state.record_path("tiny").unlink(missing_ok=True)
        os.sync()


def medians(times: int, works: dict[str, Callable[[], float]], between: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each, one after the other in turn: what else the machine does meets them alike."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(times):
        for name, work in works.items():
            between()
            taken[name].append(work())
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def timed(command: str) -> float:
    """Seconds of a shell command that must succeed."""
    started = time.monotonic()
    subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def download(host: Host, server: Server, files: list[str], *, total: int, runs: int) -> None:
    """Our two HTTP paths against curl with one and with eight connections."""
    config = host.scratch / "curl.txt"
    out = host.scratch / "curl"
    config.write_text(
        "".join(f'url="{server.address}/plain/{name}"\noutput="{out}/{name}"\ncreate-dirs\n' for name in files)
    )

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        host.clear()

    peaks: list[float] = []

    def stage(source: dict[str, Any]) -> float:
        seconds, peak = host.run("stage", "tiny", "--spec", str(host.spec(source)))
        peaks.append(peak)
        return seconds

    hub = {"kind": "hub", "repository": REPOSITORY, "revision": COMMIT, "endpoint": server.address}
    parallel = f"curl -sS --no-progress-meter --fail -Z --parallel-max 8 -K {config} 2>/dev/null"
    hashing = f'find {out} -type f -print0 | xargs -0 -n 1 -P "$(nproc)" sha256sum'
    curls = {
        "curl": f"curl -sS --no-progress-meter --fail -K {config}",
        "curl -Z 8": parallel,
        "curl -Z 8 with sync": f"{parallel} && sync -f {out}",
        "curl -Z 8 with sync and sha256sum": f"{parallel} && sync -f {out} && {hashing}",
    }
    works: dict[str, Callable[[], float]] = {name: partial(timed, command) for name, command in curls.items()}
    works["http source"] = lambda: stage({"kind": "http", "url": f"{server.address}/plain"})
    works["hub source"] = lambda: stage(hub)
    taken = medians(runs, works, clear)
    print(f"download of {total / 1e6:.0f} MB in {len(files)} files, MB/s", flush=True)
    for name in curls:
        print(f"  {name}: {total / taken[name] / 1e6:.0f}")
    for name in ("http source", "hub source"):
        ratios = ", ".join(f"{taken[other] / taken[name]:.2f}x {other}" for other in curls)
        print(f"  {name}: {total / taken[name] / 1e6:.0f}, hashed, flushed and published: {ratios}", flush=True)
    print(f"  peak {max(peaks):.0f} MB")


def verification(host: Host, server: Server, total: int, runs: int) -> None:
    """Full verification of a staged checkpoint, against sha256sum."""
    if not host.destination.exists():
        source = {"kind": "hub", "repository": REPOSITORY, "revision": COMMIT, "endpoint": server.address}
        host.run("stage", "tiny", "--spec", str(host.spec(source)))
    find = f"find {host.destination} -type f -print0"
    timed(f"{find} | xargs -0 cat")  # page cache: the comparison is of hashing
    peaks = []

    def verify() -> float:
        seconds, peak = host.run("verify", "tiny", "--full")
        peaks.append(peak)
        return seconds

    works: dict[str, Callable[[], float]] = {
        "one": lambda: timed(f"{find} | xargs -0 sha256sum"),
        "all": lambda: timed(f'{find} | xargs -0 -n 1 -P "$(nproc)" sha256sum'),
        "ours": verify,
    }
    taken = medians(runs, works, lambda: None)
    single, every, ours = taken["one"], taken["all"], taken["ours"]
    print(
        f"full verification of {total / 1e6:.0f} MB: {total / ours / 1e6:.0f} MB/s; {every / ours:.2f}x of "
        f"xargs -P$(nproc) sha256sum ({total / every / 1e6:.0f}), {single / ours:.2f}x of one sha256sum "
        f"({total / single / 1e6:.0f}); peak {max(peaks):.0f} MB",
        flush=True,
    )


def quick(host: Host, runs: int) -> None:
    """Quick verification of 64 sparse files of 9 GB."""
    root = host.scratch / "sparse"
    root.mkdir()
    entries, seen = [], {}
    for number in range(64):
        place = root / f"model-{number + 1:05d}-of-000064.safetensors"
        with place.open("wb") as handle:
            handle.truncate(9_000_000_000)
        entries.append({"path": place.name, "size": 9_000_000_000, "sha256": "0" * 64})
        seen[place.name] = Seen.of(place.stat())
    manifest = Manifest.listed("sparse", None, entries)
    host.state.save(records.Record("sparse", str(root), "adopted", manifest, seen, 0.0, 0.0))
    taken = medians(runs, {"quick": lambda: host.run("verify", "sparse")[0]}, lambda: None)["quick"]
    shutil.rmtree(root)
    print(f"quick verification of 64 x 9 GB sparse files: {taken:.2f} s, start of Python included", flush=True)


def resume(host: Host, root: Path, total: int, runs: int) -> None:
    """Bytes sent again after SIGKILL at 90 %, counted by a server that holds little of what it counts as sent."""
    server = Server(root, str(SEND_BUFFER))
    try:
        _resume(host, server, total, runs)
    finally:
        server.close()


def _resume(host: Host, server: Server, total: int, runs: int) -> None:
    source = {"kind": "hub", "repository": REPOSITORY, "revision": COMMIT, "endpoint": server.address}
    again = []
    for _ in range(runs):
        host.clear()
        server.ask("reset")
        place = str(host.spec(source, bandwidth_limit=max(total // 4, 1 << 20)))
        child = host.start("stage", "tiny", "--spec", place)
        while server.ask("") < total * 0.9:
            time.sleep(0.02)
        child.kill()
        child.wait()
        host.run("stage", "tiny", "--spec", str(host.spec(source)))
        again.append(100 * (server.ask("") - total) / total)
    print(
        f"killed at 90 %, resumed: {statistics.median(again):.2f} % of the total sent again "
        f"(worst {max(again):.2f} %; in flight at the kill included)",
        flush=True,
    )


def main() -> None:
    """Run everything and print the figures with the machine's load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--shard-bytes", type=int, default=64 << 20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path)
    arguments = parser.parse_args()
    arguments.figures = arguments.figures or FIGURES
    if unknown := sorted(set(arguments.figures) - set(FIGURES)):
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    scratch = Path(tempfile.mkdtemp(prefix="bench-staging-", dir=arguments.scratch))
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, medians of {arguments.runs}",
        flush=True,
    )
    server = None
    try:
        root = synthetic.make(scratch / "hub", arguments.shards, arguments.shard_bytes)
        files = sorted(place.relative_to(root).as_posix() for place in root.rglob("*") if place.is_file())
        total = sum((root / name).stat().st_size for name in files)
        server = Server(root)
        host = Host(scratch)
        hub = {"kind": "hub", "repository": REPOSITORY, "revision": COMMIT, "endpoint": server.address}
        job = CheckpointJob.read(host.spec(hub, manifest=None))
        listed = open_source(job, Progress(job.name), threading.Event()).listing()
        write_json(scratch / "manifest.json", listed and listed.document())
        if "download" in arguments.figures:
            download(host, server, files, total=total, runs=arguments.runs)
        if "verify" in arguments.figures:
            verification(host, server, total, arguments.runs)
        if "quick" in arguments.figures:
            quick(host, arguments.runs)
        if "resume" in arguments.figures:
            resume(host, root, total, arguments.runs)
        print(f"load {os.getloadavg()[0]:.1f} after")
    finally:
        if server is not None:
            server.close()
        subprocess.run(["chmod", "-R", "u+w", scratch], check=False)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
