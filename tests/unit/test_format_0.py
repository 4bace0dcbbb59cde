"""What e91294b wrote stays readable, and what it started stays current. Goes with rig/artifacts/format_0.py.

That version wrote tests/fixtures/e91294b/serving: its run specifications of the tour's host and of the sandbox, the
catalogues and plans that they were made of, and the state that it recorded for a rollback.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.artifacts.rollback_states import known_as
from rig.artifacts.units import run_specification, unit_files
from rig.catalog.entries import ROOT, load_catalog
from rig.host.settings import HostSettings
from rig.operations import system
from rig.plan import host_plan as plans
from rig.plan.host_plan import HostPlan, host_plan
from rigctl.contract import layout
from rigctl.contract.order import ContractError, Document
from rigctl.contract.run_specification import RunSpecification
from rigctl.services import status
from rigctl.supervisor.specification import Specification, named
from rigctl.whole_files import write_json
from tests.unit.test_operations import apply
from tests.unit.test_run_specification import changed, parts

WRITTEN = ROOT / "tests/fixtures/e91294b/serving"
FILES = sorted(path for place in ("tour", "sandbox") for path in (WRITTEN / place).iterdir())
STATE = json.loads((WRITTEN / "state.json").read_text())


def as_written(order: RunSpecification) -> Document:
    """A document of format 0 with the content of an order."""
    found = order.document()
    for newer in ("format", "family", "same_as"):
        del found[newer]
    [endpoint] = found.pop("endpoints")
    del found["limits"]["shared_memory"]
    if found["speculation"]:
        del found["speculation"]["method"]
    return {**found, **endpoint}


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_its_digest_is_one_of_ours(path: Path, same_plans: dict[str, HostPlan]) -> None:
    written = json.loads(path.read_text())
    order = run_specification(same_plans[path.parent.name], path.stem)
    assert order.same_as == [written["digest"]]
    assert order.unit_digest == written["unit_digest"]
    assert {**as_written(order), "digest": written["digest"]} == written


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_its_files_are_read(path: Path) -> None:
    written = json.loads(path.read_text())
    order = Specification.read(path)
    assert as_written(order) == written
    assert order.known_as == [written["digest"]]
    assert (order.base_url, order.unit) == (f"http://{written['host']}:{written['port']}", f"kimi-{path.stem}.service")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_missing_or_later_key_in_one_is_refused(path: Path) -> None:
    written = json.loads(path.read_text())
    for key in written:
        with pytest.raises(ContractError, match=key):
            RunSpecification.parse({k: v for k, v in written.items() if k != key}, "x")
    for place, key in (((), "endpoints"), ((), "same_as"), ((), "other"), (("limits",), "shared_memory")):
        part = written
        for name in place:
            part = part[name]
        with pytest.raises(ContractError, match=key):
            RunSpecification.parse(changed(written, place, {**part, key: "50%"}), "x")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_is_accepted_of_it_is_taken_as_it_is_written(data: st.DataObject) -> None:
    mutated: Any = json.loads(data.draw(st.sampled_from(FILES)).read_text())
    places = [*parts(mutated)]
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
        monkeypatch.setattr(status, "identities", lambda _: {})
        self.started = root / "RUNTIME" / self.name / "started.json"
        self.started.parent.mkdir()
        self.starts((WRITTEN / "sandbox" / f"{self.name}.json").read_text())

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
    facts = json.loads(running.started.read_text())
    running.started.write_text(json.dumps({"digest": facts["digest"], "accepted_at": 1}))  # it knew no same_as
    assert not running.stale
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


@pytest.mark.parametrize(("digest", "restarts"), [("of format 0", False), ("of another", True)])
def test_a_deploy_restarts_what_is_stale_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digest: str, restarts: bool
) -> None:
    write_json(running.started, {"digest": digest, "same_as": []}, durable=False)
    log = tmp_path / "called"
    for program, words in (("systemctl", f'echo "$@" >> {log}'), ("rigctl", "echo '[]'")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(layout, "RIGCTL", str(tmp_path / "rigctl"))
    monkeypatch.setattr(layout, "AT_WORK", str(tmp_path / "at-work.lock"))
    digests = {running.name: ["of format 1", "of format 0"], "stopped": ["x"]}
    assert apply(system.running_current, digests=digests, restart="now") == restarts
    assert log.exists() == restarts


def test_its_state_names_the_digests_of_its_units() -> None:
    assert known_as(STATE) == {name: [digest] for name, digest in STATE["units"].items()}


def test_a_damaged_state_cannot_come_back() -> None:
    path = "/etc/kimi-rig/configurations/vllm-base.json"
    with pytest.raises(ContractError, match=f"{path}: not JSON"):
        known_as({**STATE, "files": {}})
    with pytest.raises(ContractError, match=f"{path}: format 9 is newer"):
        known_as({**STATE, "files": {**STATE["files"], path: '{"format": 9}'}})
