"""What a benchmark must not hide, planted on a deployed box with the real engine: pytest --real on this file.

Unfair limits, a cold cell, two modes, an engine that dies, a full disk, an interrupted sweep; about twelve minutes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rig.bench.sweeps import STATE
from rig.catalog.entries import ROOT
from rig.cli.bench import ledger, report
from tests.drill.conftest import DrillBox

NAME = "vllm-base"
UNIT = f"kimi-{NAME}"
COMMON = {"requests_per_stream": 2, "least_requests": 4, "output_tokens": 64}
WARMUP = {"least": 1, "most": 1}
SWEEPS: dict[str, dict[str, Any]] = {
    "planted-limits": {
        "rounds": 2,
        "loads": [{"context": 0, "concurrency": [8]}],
        "variants": {"limit-2": {"max_running_requests": 2}, "limit-256": {"max_running_requests": 256}},
    },
    "planted-layers": {
        "rounds": 1,
        "loads": [{"context": 0, "concurrency": [1]}],
        "variants": {"given": {"layer_shift": 0}, "later": {"layer_shift": 1}},
    },
    "planted-modes": {"rounds": 6, "least_requests": 8, "loads": [{"context": 0, "concurrency": [1, 2]}]},
    "planted-death": {"rounds": 2, "loads": [{"context": 0, "concurrency": [1, 2]}]},
    "planted-full": {"rounds": 2, "loads": [{"context": 0, "concurrency": [1, 2, 3]}]},
    "planted-stop": {"rounds": 2, "loads": [{"context": 0, "concurrency": [1, 2]}], "output_tokens": 63},
}
# Rounds in which the engine's worker is stopped seven eighths of the time: the first is cold; every other one is slow.
SLOWED = {1: {1}, 2: {2, 4, 6}}
SLOW = "/var/tmp/drill-slow"
SLOWER = (
    f"while sleep 0.1; do if [ -e {SLOW} ]; then w=$(pgrep -f ^VLLM::Worker); kill -STOP $w; sleep 0.7; "
    "kill -CONT $w; fi; done"
)


@dataclass
class Bench:
    """A copy of the repository with sweeps of the drill's own, and a ledger of its own."""

    box: DrillBox
    copy: Path
    home: Path
    inventory: str = "inventory/sandbox.py"

    def start(self, sweep: str, name: str = NAME) -> subprocess.Popen[str]:
        """Begin to measure; standard output and error are one pipe."""
        command = [sys.executable, "-m", "rig", "bench", "run", self.inventory, "--sweep", sweep, "--configs", name]
        command += ["--ledger", str(self.home / sweep), "--out", str(self.home / f"{sweep}-report")]
        return subprocess.Popen(
            command, cwd=self.copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def run(self, sweep: str, name: str = NAME) -> tuple[int, str]:
        """Exit code and what was said."""
        process = self.start(sweep, name)
        said, _ = process.communicate(timeout=1200)
        return process.returncode, said

    def results(self, sweep: str) -> list[ledger.Result]:
        """What the ledger has of a sweep, in the order it was measured."""
        return sorted(ledger.results(ledger.read(self.home / sweep)), key=lambda entry: entry.at)

    def page(self, sweep: str) -> str:
        """The report's Markdown."""
        [page] = [
            path for path in report.write(ledger.read(self.home / sweep), self.home / "page") if path.suffix == ".md"
        ]
        return page.read_text()

    def wait_for(self, text: str, seconds: float = 300) -> None:
        """Until the sweep on the host says `text`."""
        end = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < end, f"the sweep never said {text!r}:\n{self.said()}"
            time.sleep(0.3)

    def said(self) -> str:
        """Everything that the sweep's job said since the test began."""
        return self.box.ssh(
            "journalctl -q -o cat --since=@$(cat /run/drill-bench-begun) -u 'kimi-bench-*'", check=False
        )


@pytest.fixture(scope="module")
def bench(
    session_box: DrillBox, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    if not request.config.getoption("--real"):
        pytest.skip("--real starts the deployed engine several times")
    copy = tmp_path_factory.mktemp("copy")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in files.split("\0"):
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file)
    path = copy / "inventory" / "benchmark.yaml"
    sweeps = {name: {**COMMON, "warmup": WARMUP, **content} for name, content in SWEEPS.items()}
    path.write_text(path.read_text() + yaml.safe_dump(sweeps))
    found = Bench(session_box, copy, tmp_path_factory.mktemp("ledger"))
    yield found
    session_box.ssh(f"systemctl stop 'kimi-bench-*' '{UNIT}*'; rm -rf {STATE}/planted-*", check=False)


@pytest.fixture(autouse=True)
def begun(bench: Bench) -> None:
    bench.box.ssh(
        f"systemctl stop 'kimi-bench-*' '{UNIT}*'; rm -rf {STATE}/planted-*; date +%s > /run/drill-bench-begun"
    )


def test_unequal_limits_are_named(bench: Bench) -> None:
    code, said = bench.run("planted-limits")
    assert code == 0, said
    page = bench.page("planted-limits")
    assert f"limits of running requests differ ({NAME}.limit-2: 2, {NAME}.limit-256: 256)" in page
    assert "at most 2 requests ran while up to 6 waited" in page
    assert "the answers add up" not in page, "somebody else's tokens were counted: the supervisor asked meanwhile"
    assert "concurrent requests: vllm" not in page, "it recommends one of two that cannot be compared"


def test_a_drafter_is_served_with_other_layer_ids(bench: Bench) -> None:
    """The checkpoint behind it is the one that was proved, and nothing of it is left."""
    name = "vllm-eagle3-custom"
    code, said = bench.run("planted-layers", name)
    assert code == 0, said
    given, later = (result.configuration.drafter for result in bench.results("planted-layers"))
    assert given is not None and later is not None and given.layer_ids is not None
    assert later.layer_ids == [layer + 1 for layer in given.layer_ids]
    left = f"ls -d /data/eagle3/.bench/* /etc/systemd/system/kimi-{name}.*.service 2>/dev/null"
    assert not bench.box.ssh(left, check=False)


def test_cold_and_bimodal_rounds_are_named(bench: Bench) -> None:
    slow = bench.box.path(SLOW)
    # One connection that waits: asking again and again would take the engine's time.
    journal = bench.box.box.ssh_command("journalctl -f -q -o cat -n 0 _TRANSPORT=stdout")
    told = subprocess.Popen(journal, stdout=subprocess.PIPE, text=True)

    def follow() -> None:
        for line in told.stdout or ():
            if "cells done" not in line:
                continue
            number = int(line.partition(": round ")[2].partition(" of ")[0] or 0)
            streams = int(line.partition("-n")[2].partition(":")[0] or 0)
            if number in SLOWED.get(streams, set()):
                slow.touch()
            else:
                slow.unlink(missing_ok=True)

    bench.box.ssh(shlex.join(["systemd-run", "-q", "--unit=drill-slower", "sh", "-c", SLOWER]))
    watcher = threading.Thread(target=follow)
    watcher.start()
    try:
        code, said = bench.run("planted-modes")
    finally:
        told.terminate()
        watcher.join()
        slow.unlink(missing_ok=True)
        bench.box.ssh("sleep 0.5; systemctl stop drill-slower; pkill -CONT -f ^VLLM::Worker", check=False)
    assert code == 0, said
    speeds = [[round(one.output_tok_s, 1) for one in result.rounds] for result in bench.results("planted-modes")]
    page = bench.page("planted-modes")
    assert "the first round was cold" in page, speeds
    assert "the rounds fall into two groups, 3 around" in page, speeds


def test_an_engine_that_dies_fails_its_cell_only(bench: Bench) -> None:
    process = bench.start("planted-death")
    bench.wait_for("round 1 of 2")
    time.sleep(2)
    bench.box.ssh(f"kill -KILL {bench.box.pid(NAME, '.*vllm', prefix='')}")
    said, _ = process.communicate(timeout=1200)
    assert process.returncode == 1, said
    one, two = bench.results("planted-death")
    assert (one.status, two.status) == ("failed", "measured")
    assert one.cause is not None
    assert "the engine" in one.cause
    assert one.cause[:60] in bench.page("planted-death")


def test_a_full_disk_ends_the_sweep_and_loses_nothing(bench: Bench) -> None:
    box = bench.box
    box.ssh(f"mkdir -p {STATE} && mount -t tmpfs -o size=260M tmpfs {STATE}")
    try:
        process = bench.start("planted-full")
        bench.wait_for("n2: round 1 of 2")
        box.ssh(f"head -c 100M /dev/zero > {STATE}/filler")
        said, _ = process.communicate(timeout=1200)
        assert process.returncode == 1, said
        assert "make room and run the benchmark again" in said
        cells = f"{STATE}/planted-full-*/cells"
        kept = _files(box, cells)
        assert kept
        box.ssh(f"rm {STATE}/filler")
        code, said = bench.run("planted-full")
        assert code == 0, said
        later = _files(box, f"{STATE}/planted-full-*.done/cells")
        assert {name: later.get(name) for name in kept} == kept, "a finished cell was measured again"
    finally:
        box.ssh(f"systemctl stop 'kimi-bench-*'; umount {STATE}")
    assert len(bench.results("planted-full")) == 3


def _files(box: DrillBox, directory: str) -> dict[str, str]:
    """Name and content of every file of a directory in the box."""
    return {Path(path).name: box.ssh(f"cat {path}") for path in box.ssh(f"ls {directory}/*").split()}


def test_an_interrupted_sweep_repeats_nothing(bench: Bench) -> None:
    process = bench.start("planted-stop")
    bench.wait_for("n2: round 1 of 2")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    bench.box.ssh("systemctl stop 'kimi-bench-*'")
    [path] = bench.box.ssh(f"ls {STATE}/planted-stop-*/cells/*").split()
    first = json.loads(bench.box.ssh(f"cat {path}"))
    code, said = bench.run("planted-stop")
    assert code == 0, said
    one, two = bench.results("planted-stop")
    assert (one.at, one.status, two.status) == (first["at"], "measured", "measured")
