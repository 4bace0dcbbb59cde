"""A deploy that is interrupted at a chosen point: when pyinfra starts an operation, and a moment later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rig.catalog.entries import ROOT
from tests.sandbox.conftest import DeployBox

PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Point:
    """Where and how. at: part of an operation's name, or of another line of pyinfra's. seconds: how long after it."""

    how: str
    at: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.how} at '{self.at}' + {self.seconds} s"


def interrupt(box: DeployBox, point: Point, *arguments: str) -> int:
    """Begin a deploy (or `arguments`), interrupt it there; its exit code. Fails when the point was not reached."""
    command = [sys.executable, "-m", *(arguments or ("rig", "deploy", "-v", box.inventory))]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        _until(process, point)
        time.sleep(point.seconds)
        HOW[point.how](box, process)
        process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _until(process: subprocess.Popen[str], point: Point) -> None:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if point.at in line and ("Starting operation" in line or "Connect" in point.at):
            return
    raise AssertionError(f"never came to {point}:\n{''.join(seen[-20:])}")


def _kill_deploy(_box: DeployBox, process: subprocess.Popen[str]) -> None:
    """The wrapper alone: its pyinfra ends with it, or the wait for the end of its output would not."""
    process.kill()


def _kill_connection(box: DeployBox, _process: subprocess.Popen[str]) -> None:
    """End the SSH server processes of logins in the box, from this computer; their commands go on."""
    root = box.box.root.stat()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            title = (entry / "cmdline").read_bytes()
            if title.startswith(b"sshd: root") and os.path.samestat((entry / "root").stat(), root):
                os.kill(int(entry.name), signal.SIGKILL)


def _kill_job(box: DeployBox, _process: subprocess.Popen[str]) -> None:
    """Kill the job on the host; waits for it to be at work."""
    kill = "systemctl list-units --plain --no-legend --state=active 'kimi-job-*' | grep -q . && "
    kill += "systemctl kill -s KILL 'kimi-job-*'"
    end = time.monotonic() + 60
    while box.ssh(kill, check=False).returncode != 0:
        assert time.monotonic() < end, "no job of ours was at work"
        time.sleep(0.2)


def _kill_package_manager(box: DeployBox, _process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while box.ssh("pkill -KILL -x 'apt-get|dpkg'", check=False).returncode != 0:
        assert time.monotonic() < end, "no package manager was at work"
        time.sleep(0.2)


def _stop_box(box: DeployBox, _process: subprocess.Popen[str]) -> None:
    for verb in ("stop", "up"):
        done = box.run("rig", "sandbox", "--name", box.box.name, verb)
        assert done.returncode == 0, done.stderr


HOW: dict[str, Callable[[DeployBox, subprocess.Popen[str]], None]] = {
    "deploy killed": _kill_deploy,
    "connection killed": _kill_connection,
    "job killed on the host": _kill_job,
    "apt killed on the host": _kill_package_manager,
    "box stopped": _stop_box,
}
