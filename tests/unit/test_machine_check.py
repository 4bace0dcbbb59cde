"""Machines that cannot have the box are told why, before anything is installed and at once."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rig.sandbox.machine_check import LEAST_DISK, LEAST_MEMORY, Computer, memory_bytes, reasons

FIT = Computer("Linux", "x86_64", 0, int(LEAST_MEMORY), LEAST_DISK, has_apt=True, has_box=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"system": "Darwin", "machine": "arm64"}, "this is Darwin"),
        ({"machine": "aarch64"}, "the processor is aarch64"),
        ({"euid": 1000}, "run the same command with sudo"),
        ({"memory": 2_000_000_000}, "2.0 GB of memory"),
        ({"disk": 3_000_000_000}, "KIMI_RIG_SANDBOX_DIR"),
        ({"has_apt": False}, "use Debian or Ubuntu"),
        ({"python": (3, 9)}, "python3 is 3.9"),
    ],
)
def test_unfit(change: dict[str, Any], reason: str) -> None:
    [found] = reasons(replace(FIT, **change))
    assert reason in found


def test_fit_and_all_reasons_at_once() -> None:
    assert reasons(FIT) == []
    assert len(reasons(replace(FIT, machine="arm64", euid=1, memory=0))) == 3


def test_memory_is_read() -> None:
    assert memory_bytes("MemTotal:        2048000 kB\nMemFree: 1 kB\n") == 2_097_152_000
    assert memory_bytes("") == 0


def test_it_answers_in_seconds_on_a_bare_interpreter() -> None:
    """No package of ours or of others is needed: `-I -S` hides them all."""
    begun = time.monotonic()
    code = "import sys; sys.path.insert(0, '.'); from rig.sandbox.machine_check import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode in (0, 1)
    assert bool(result.stderr) == bool(result.returncode)
    assert time.monotonic() - begun < 5


def test_a_root_is_made_by_a_bare_interpreter(tmp_path: Path) -> None:
    """While pip installs what all else needs. Here the box's directory is somebody else's, so nothing is made."""
    (tmp_path / "sandbox").mkdir()
    (tmp_path / "sandbox" / "theirs").touch()
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "files/hostkit", "KIMI_RIG_SANDBOX_DIR": str(tmp_path)}
    command = [sys.executable, "-S", "-m", "rig.sandbox.build"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"failed: {tmp_path}/sandbox exists and is not a box of ours")
    assert len(result.stderr.splitlines()) == 1


def test_a_virtual_environment_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    checkout = tmp_path / "checkout"
    (checkout / "files" / "hostkit").mkdir(parents=True)
    (checkout / "requirements").mkdir()
    for name in ("Makefile", "requirements/run.txt", "pyproject.toml", "files/hostkit/pyproject.toml"):
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    (checkout / ".venv").symlink_to(tmp_path / "elsewhere")
    done = subprocess.run(["make", ".venv/ready"], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f".venv is a link to {tmp_path}/elsewhere" in done.stderr and "remove the link" in done.stderr
    assert (checkout / ".venv").is_symlink()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["kept"]
