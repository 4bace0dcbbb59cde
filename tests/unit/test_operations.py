"""Operations on this machine, through pyinfra's local connector: real shells, real files, in a temporary directory."""

from __future__ import annotations

import getpass
import grp
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.operation import add_op
from pyinfra.api.operations import run_ops

from rig.operations import deploy_lock, files, system, training
from rig.operations.common import PLAN_LOG, Input
from rig.operations.files import Directory, File, Link, difference
from rigctl.contract import layout
from tests.support.plans import GROUP_DATA

ME, MINE = getpass.getuser(), grp.getgrgid(os.getgid()).gr_name


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What operations remember on the host goes to a directory of the test's."""
    state = tmp_path / "state"
    monkeypatch.setattr(layout, "STATE", str(state))
    monkeypatch.setattr(layout, "CREATED", str(state / "created"))
    monkeypatch.setattr(layout, "RUNTIME", str(tmp_path / "run"))
    monkeypatch.setattr(layout, "AT_WORK", str(tmp_path / "run" / "at-work.lock"))
    return state


def local_state() -> State:
    return State(Inventory((["@local"], {})), Config())  # type: ignore[no-untyped-call]  # pyinfra leaves both untyped


def apply(operation: Callable[..., Any], **arguments: Any) -> bool:
    """Run one operation here; whether it changed anything. Raises PyinfraError when it fails."""
    state = local_state()
    connect_all(state)
    try:
        results = add_op(state, operation, **arguments)
        run_ops(state)
        [meta] = results.values()
        assert meta.did_succeed()
        return bool(meta.did_change())
    finally:
        disconnect_all(state)


def dry_details(log: Path) -> list[str]:
    return [json.loads(line)["detail"] for line in log.read_text().splitlines()]


def test_present_converges(tmp_path: Path, state_directory: Path) -> None:
    content = b"bytes \x00\xff and\nlines without an end"
    entries: list[files.Entry] = [
        Directory(str(tmp_path / "a"), "0750", ME, MINE),
        File(str(tmp_path / "a/b c/file"), content, "0640", ME, MINE),
        Link(str(tmp_path / "link"), "/nowhere"),
    ]
    assert apply(files.present, entries=entries)
    assert (tmp_path / "a/b c/file").read_bytes() == content
    assert (tmp_path / "a/b c/file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").readlink() == Path("/nowhere")
    assert not apply(files.present, entries=entries)
    remembered = (state_directory / "created").read_text().splitlines()
    # Nothing that was there before, and every parent that was made on the way.
    created = [f"{type(entry).__name__.lower()} {entry.path}" for entry in entries]
    assert sorted(remembered) == sorted([*created, f"directory {tmp_path}/a/b c"])


def test_present_repairs_content_and_mode_and_remembers_nothing_of_others(
    tmp_path: Path, state_directory: Path
) -> None:
    path = tmp_path / "theirs"
    path.write_text("old")
    entry = File(str(path), b"new", "0600", ME, MINE)
    assert apply(files.present, entries=[entry])
    assert path.read_text() == "new"
    path.chmod(0o644)
    assert apply(files.present, entries=[entry])
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (state_directory / "created").exists()


def test_an_existing_directory_of_the_operators_is_left_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o711)
    before = shared.stat()
    assert not apply(files.present, entries=[Directory(str(shared))])
    assert shared.stat() == before


def test_a_killed_write_leaves_the_old_file_and_the_next_one_clears_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / ".file.kimi-rig.abc123").write_text("half of the n")
    assert apply(files.present, entries=[File(str(tmp_path / "file"), b"new", "0644", ME, MINE)])
    assert sorted(path.name for path in tmp_path.glob("*file*")) == ["file"]


def test_another_kind_of_thing_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing/precious").write_text("data")
    with pytest.raises(PyinfraError):
        apply(files.present, entries=[File(str(tmp_path / "thing"), b"x", "0644", ME, MINE)])
    assert (tmp_path / "thing/precious").read_text() == "data"


def test_a_dry_run_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv(PLAN_LOG, str(log))
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o600)
    state = local_state()
    connect_all(state)
    add_op(state, files.present, entries=[File(str(tmp_path / "file"), b"new", "0644", ME, MINE)])
    disconnect_all(state)
    assert dry_details(log) == [f"{tmp_path}/file: content differs, mode 0600 (not 0644)"]
    assert (tmp_path / "file").read_text() == "old"


def test_difference_in_words() -> None:
    assert difference(Directory("/d"), None) == "/d is missing"


SECRET = b"key-5bf3-top-secret"


@pytest.mark.skipif(os.getuid() != 0, reason="a secret belongs to root; tests/sandbox proves it as well")
def test_a_secret_converges_and_shows_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    assert apply(files.secret, path=str(path), content=SECRET)
    assert path.read_bytes() == SECRET
    assert path.stat().st_mode & 0o777 == 0o600
    assert not apply(files.secret, path=str(path), content=SECRET)
    path.chmod(0o644)
    assert apply(files.secret, path=str(path), content=SECRET)
    assert apply(files.secret, path=str(path), content=b"another")
    assert path.read_bytes() == b"another"


def test_standard_input_never_shows_its_content() -> None:
    assert repr(Input(SECRET)) == str(Input(SECRET)) == "<19 bytes>"


def test_the_lock_names_its_owner_and_goes_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_lock, "LOCK", str(tmp_path / "deploy.lock"))
    script = deploy_lock.lock_script("me@here (process 7) since today").replace("/run/kimi-rig", str(tmp_path))
    holder = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    second = subprocess.run(["sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert second.stdout.startswith("me@here (process 7) since today, for ")
    holder.stdin.close()
    holder.wait(5)
    third = subprocess.run(["sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert third.stdout == "held\n"


FAKE_HOST = """
gpu = [("@fake/bare", {
    "fake_delay": 0, "fake_delay_jitter": 0,
    "fake_responses": {"/etc/os-release": {"stdout": ["os ubuntu-24.04", "machine x86_64"]}},
})]
"""


def test_a_dry_run_prepares_against_a_host_that_has_nothing_yet(tmp_path: Path) -> None:
    inventory = tmp_path / "bare.py"
    inventory.write_text(FAKE_HOST)
    command = ["-m", "pyinfra", "--group-data", str(GROUP_DATA), str(inventory), "deploy.py", "--dry", "--json"]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    plan = {operation["name"]: operation["hosts_with_change"] for operation in json.loads(result.stdout)["plan"]}
    changing = [name for name, hosts in plan.items() if hosts]
    assert "Engines | Build the environment of vllm-0.16.0" in changing
    assert "Units | Write units" in changing
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("answer", ["exit 1", "echo '['", "echo 3", "echo '[{}]'", "kill -9 $$"])
def test_a_status_that_fails_is_not_taken_for_a_host_where_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str
) -> None:
    program = tmp_path / "rigctl"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setattr(layout, "RIGCTL", str(program))
    monkeypatch.setattr(layout, "AT_WORK", str(tmp_path / "at-work.lock"))
    with pytest.raises(PyinfraError):
        apply(system.running_current, digests={"a": ["x"]}, restart="now")
    program.unlink()
    assert not apply(system.running_current, digests={"a": ["x"]}, restart="now"), "a host that has no rigctl yet"


def test_orders_of_other_trainings_go_and_directories_of_ours_are_listed_whole(
    tmp_path: Path, state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, filled = tmp_path / "orders", tmp_path / "data" / "mine"
    monkeypatch.setattr(layout, "TRAINING", str(orders))
    assert not apply(training.retired, keep=[]), "a host that has never trained"
    for name in ("mine.prompts", "other.prompts"):
        (orders / name).mkdir(parents=True)
        (orders / name / "0-chat.jsonl").write_text("{}")
    for name in ("mine.json", "other.json"):
        (orders / name).write_text("{}")
    assert apply(training.retired, keep=["mine"])
    assert sorted(path.name for path in orders.iterdir()) == ["mine.json", "mine.prompts"]
    assert not apply(training.retired, keep=["mine"])
    assert apply(training.owned, paths=[str(filled)])
    assert (state_directory / "created").read_text().splitlines() == [f"tree {filled}"]
    filled.mkdir(parents=True)
    assert not apply(training.owned, paths=[str(filled)])
