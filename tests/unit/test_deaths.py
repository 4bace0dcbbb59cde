"""Which process of an engine ended first."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rigctl.supervisor import deaths
from rigctl.supervisor.deaths import Deaths, exit_text

# A main process whose worker is no child of the supervisor, as an engine has it; it ends a moment after its worker.
ENGINE = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "worker"])
print(worker.pid, flush=True)
time.sleep(float(sys.argv[1]))
worker.wait()
sys.exit(3)
"""


@pytest.fixture
def engine() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, "-c", ENGINE, "0.5"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        yield process, worker
        for pid in (worker, process.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)


def test_the_worker_that_was_killed_is_named(engine: tuple[subprocess.Popen[str], int]) -> None:
    process, worker = engine
    seen = Deaths()
    seen.follow([process.pid, worker])
    seen.follow([process.pid, worker])
    assert seen.first(process.pid) is None
    subprocess.run(["kill", "-9", str(worker)], check=True)
    assert process.wait(10) == 3
    said = seen.first(process.pid) or ""
    assert said.startswith(f"process {worker} {sys.executable} -c import time"), said
    assert said.endswith("worker had ended: signal SIGKILL: " + deaths.KILLED)


def test_a_main_process_that_ended_first_has_nobody_before_it(engine: tuple[subprocess.Popen[str], int]) -> None:
    process, worker = engine
    seen = Deaths()
    seen.follow([process.pid, worker])
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    time.sleep(0.2)
    subprocess.run(["kill", "-9", str(worker)], check=True)
    time.sleep(0.2)
    assert seen.first(process.pid) is None


def test_a_helper_of_the_load_is_no_cause_of_an_end_in_service(engine: tuple[subprocess.Popen[str], int]) -> None:
    """vLLM 0.26.0 asks a process of its own about the model; its parent takes note of its end at once."""
    process, worker = engine
    seen = Deaths()
    time.sleep(0.1)
    seen.follow([process.pid, worker])
    seen._ended.append((time.monotonic(), worker, None))
    assert seen.first(process.pid) is None, "how it ended is not known, and helpers come and go"
    seen.begin_service()
    assert seen.first(process.pid) is None, "it ended before"
    seen._ended.append((time.monotonic(), worker, None))
    assert (seen.first(process.pid) or "").endswith("worker had ended")


def test_helpers_that_ended_well_or_long_ago_are_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Deaths()
    with subprocess.Popen(["sleep", "0.3"]) as helper, subprocess.Popen(["sh", "-c", "sleep 0.3; exit 7"]) as failed:
        seen.follow([helper.pid, failed.pid, 2**22 + 5])
        time.sleep(0.1)
        seen.follow([helper.pid, failed.pid])  # by now it is the other program
        time.sleep(0.6)
        assert seen.first(1) == f"process {failed.pid} sh -c sleep 0.3; exit 7 had ended: exit code 7"
        monkeypatch.setattr(deaths, "BEFORE_SECONDS", 0.0)
        assert seen.first(1) is None


@pytest.mark.parametrize(
    ("status", "text"), [(3, "exit code 3"), (-11, "signal SIGSEGV"), (-40, "signal 40"), (-9, "signal SIGKILL: .+")]
)
def test_every_end_has_words(status: int, text: str) -> None:
    assert re.fullmatch(text, exit_text(status))
