"""Nothing that a test starts outlives it, also when the whole run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from tests.support.leftovers import MARK

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SERVES = """
import os, subprocess, time
from pathlib import Path
from tests.unit.serving import Run

def test_serves(tmp_path):
    run = Run(tmp_path)
    run.until("READY=1")
    orphan = subprocess.Popen(["sh", "-c", "setsid sleep 300 & echo $!"], stdout=subprocess.PIPE, text=True)
    pids = [str(run.process.pid), orphan.stdout.readline().strip(), *children(run.process.pid)]
    Path(os.environ["PIDS"]).write_text(" ".join(pids))
    time.sleep(float(os.environ["SECONDS_LEFT"]))

def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
"""


def start(directory: Path, seconds: float, *options: str) -> subprocess.Popen[bytes]:
    """A run of its own, of one test that starts `rigctl serve` with a stand-in and an orphan, and ends neither."""
    (directory / "test_serves.py").write_text(SERVES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(directory), *options, str(directory)]
    environment = {**os.environ, "PIDS": str(directory / "pids"), "SECONDS_LEFT": str(seconds)}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT}/files/hostkit"
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def started(directory: Path) -> list[int]:
    end = time.monotonic() + 30
    while not (pids := directory / "pids").exists() or not pids.read_text():
        assert time.monotonic() < end, "the inner test did not start"
        time.sleep(0.1)
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 3
    return found


def running(pids: Sequence[int]) -> list[str]:
    """Command lines of those that have not ended."""
    lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    return [line.read_text() for line in lines if line.exists() and line.read_text()]


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "workers"])
def test_a_killed_run_leaves_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = start(tmp_path, 300, *options)
    pids = started(tmp_path)
    assert len(running(pids)) == 3
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    end = time.monotonic() + 5
    while left := running(pids):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_test_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_then.py").write_text(
        "import os\nfrom pathlib import Path\n\ndef test_then():\n"
        "    pids = Path(os.environ['PIDS']).read_text().split()\n"
        "    assert not [pid for pid in pids if Path(f'/proc/{pid}/cmdline').exists() and "
        "Path(f'/proc/{pid}/cmdline').read_text()]\n"
    )
    run = start(tmp_path, 0)
    assert run.wait(60) == 0
    assert not running(started(tmp_path))


def test_a_command_left_for_the_end_runs_if_the_run_is_killed_within_its_block(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import os, signal, sys\nfrom tests.support.leftovers import Watcher\nwatcher = Watcher()\n"
        "with watcher.afterwards(['touch', 'not-this']):\n    pass\n"
        "with watcher.afterwards(['sh', '-c', 'echo $WHAT > box'], WHAT='gone'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != MARK} | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=environment, check=False)
    end = time.monotonic() + 5
    while not (tmp_path / "box").exists() or not (tmp_path / "box").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert (tmp_path / "box").read_text() == "gone\n"
    assert not (tmp_path / "not-this").exists()
