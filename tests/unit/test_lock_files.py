"""Root's locks: no other user can hold one, a wait ends, and whoever holds one is named."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rig.operations import deploy_lock
from rig.operations.common import script
from rigctl import lock_files
from rigctl.checkpoints.record import State
from rigctl.checkpoints.workplace import is_locked, locked
from rigctl.contract import layout

ALICE = 12346
AS_ALICE = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runs programs as another user")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="locks-") as root:
        Path(root).chmod(0o755)
        monkeypatch.setattr(layout, "AT_WORK", f"{root}/at-work.lock")
        monkeypatch.setattr(layout, "RUNTIME", root)
        monkeypatch.setattr(deploy_lock, "LOCK", f"{root}/deploy.lock")
        yield Path(root)


def alice_locks(path: Path) -> bool:
    return subprocess.run([*AS_ALICE, "flock", "-sn", path, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def held(place: Path) -> Iterator[Path]:
    """A file that the version before this one left open to others, locked by a user who opened it in time."""
    path = place / "at-work.lock"
    path.touch(0o644)
    with subprocess.Popen(
        [*AS_ALICE, "flock", "-Fx", path, "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None and one.stdout.readline()
        yield path
        one.kill()


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_no_other_user_can_hold_a_lock_of_a_deploy(place: Path) -> None:
    assert run(script("true").get_raw_value()).returncode == 0
    assert run(deploy_lock.lock_script("me")).stdout == "held\n"
    for name in ("at-work.lock", "deploy.lock"):
        assert not alice_locks(place / name), name


def test_a_command_of_a_deploy_names_who_keeps_it_waiting(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rig.operations.common.LOCK_SECONDS", 0)
    done = run(script("echo worked").get_raw_value())
    assert done.returncode == 1 and "worked" not in done.stdout
    assert f"of {ALICE}" in done.stderr or "of UNKNOWN" in done.stderr
    assert f"{held} is locked by process " in done.stderr and "sleep 60" in done.stderr
    assert not alice_locks(held), "closed by the look"


def test_a_deploy_names_who_keeps_it_waiting(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_lock, "ORPHAN_SECONDS", 0)
    assert "sleep 60" in run(deploy_lock.lock_script("me")).stdout
    held.rename(held.with_name("deploy.lock"))
    said = run(deploy_lock.lock_script("me")).stdout
    assert "sleep 60" in said


def test_a_lock_of_rigctl_is_closed_and_names_its_holder(held: Path) -> None:
    assert lock_files.is_locked(held)
    named = rf"busy: {held} is locked by process \d+ of {ALICE}, unit .*: sleep 60"
    with pytest.raises(lock_files.Busy, match=named), lock_files.locked(held, "busy", 0.1):
        pass
    assert not alice_locks(held)


def test_a_staging_job_holds_two_locks_that_others_cannot(place: Path) -> None:
    state = State(place / "checkpoints")
    assert not is_locked(state, "kimi")
    with locked(state, "kimi", place / "models"):
        assert is_locked(state, "kimi")
        files = [*(state.root / "locks").iterdir()]
        assert len(files) == 2 and not any(map(alice_locks, files))
        named = f"follow kimi.*process {os.getpid()}"
        with pytest.raises(lock_files.Busy, match=named), locked(state, "kimi", place / "elsewhere"):
            pass
    assert not is_locked(state, "kimi")


LOCKS = {
    "files/hostkit/rigctl/lock_files.py": "the one place",
    "files/hostkit/rigctl/supervisor/measurement_pause.py": "between root and the service user, closed to others",
    "files/hostkit/rigctl/kernel/compile_job.py": "between programs of the builder's, in a directory of one build's",
    "rig/operations/common.py": "opened by rig/operations/locks.py",
    "rig/operations/deploy_lock.py": "opened by rig/operations/locks.py",
    "rig/sandbox/build.py": "on the machine of whoever tests",
}


def test_no_lock_is_taken_elsewhere() -> None:
    rooms = (ROOT / room for room in ("rig", "tasks", "files/hostkit/rigctl"))
    found = {path.relative_to(ROOT).as_posix() for room in rooms for path in room.rglob("*.py") if taken(path)}
    assert found == {*LOCKS}


def taken(path: Path) -> bool:
    return bool(re.search(r"\bflock\s*[(-]", path.read_text()))
