"""Package work waits for whoever holds the locks of apt and dpkg, and keeps the login."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rig.operations import apt
from tests.host import test_host

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], 'w')
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("state", "burst", "interval", "warned"),
    [
        ("active", "5", "10s", True),
        ("active", "7", "1min", True),
        ("active", "8", "10s", False),
        ("active", "5", "0", False),
        ("inactive", "5", "10s", False),
    ],
)
def test_verification_warns_of_a_login_that_upgrades_could_take_away(
    monkeypatch: pytest.MonkeyPatch, state: str, burst: str, interval: str, warned: bool
) -> None:
    values = {"Id": "ssh.service", "ActiveState": state, "StartLimitBurst": burst, "StartLimitIntervalUSec": interval}
    absent = {"Id": "ssh.socket", "ActiveState": "inactive", "StartLimitBurst": "5", "StartLimitIntervalUSec": "10s"}
    shown = "\n\n".join("\n".join(f"{key}={value}" for key, value in one.items()) for one in (values, absent))
    monkeypatch.setattr(test_host, "run", lambda _, command: shown if "ssh.socket" in command else "")
    warnings: list[str] = []
    target: Any = SimpleNamespace(host=None, name="kimi-1")
    test_host.test_package_work_leaves_the_login(target, warnings)
    assert bool(warnings) is warned
    if warned:
        assert warnings == [
            f"kimi-1: ssh.service stays down after {burst} starts in {interval}, and upgrades reach that: "
            "`systemctl edit ssh.service` and set StartLimitIntervalSec=0 under [Unit]"
        ]


@pytest.fixture
def held(tmp_path: Path) -> tuple[Path, subprocess.Popen[str]]:
    """A lock file, and the process that holds it as dpkg does."""
    lock = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return lock, process


def shell(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-euc", "; ".join(lines)], capture_output=True, text=True, timeout=30, check=False)


def test_it_waits_and_goes_on(held: tuple[Path, subprocess.Popen[str]]) -> None:
    lock, process = held
    begun = time.monotonic()
    waiting = subprocess.Popen(
        ["sh", "-euc", f"{apt.waiting(20, [str(lock)])}; free; echo done"], stdout=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1.5)
    process.kill()
    process.wait()
    assert waiting.communicate(timeout=10)[0] == b"done\n"
    assert time.monotonic() - begun < 15


def test_it_names_the_holder_and_ends_at_the_limit(held: tuple[Path, subprocess.Popen[str]]) -> None:
    lock, process = held
    said = shell(apt.holder([str(lock)]))
    assert said.stdout.startswith(f"process {process.pid} (")
    late = shell(apt.waiting(1, [str(lock)]), "free", "echo never")
    process.kill()
    process.wait()
    assert late.returncode == 1
    assert not late.stdout
    assert late.stderr.startswith(f"process {process.pid} (")
    assert "more than 1 s" in late.stderr


def test_nobody_holds_it(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    assert shell(apt.waiting(1, [str(tmp_path / "lock")]), "free", "echo done").stdout == "done\n"


def test_no_package_work_passes_by() -> None:
    """Every command that takes a lock stands in a script of apt.work, behind `free`."""
    for path in sorted(Path(apt.__file__).parent.glob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for command in ("dpkg --configure", "dpkg -i", "apt-mark hold", "apt-get -qy"):
                at = line.find(command)
                assert at < 0 or "free;" in line[:at], f"{path.name}:{number}: {line}"
