"""Several configurations beside each other: what starts at boot, ports that collide, and which one is meant."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from rig.artifacts.units import conflicts
from rig.catalog.entries import load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.cli.connect import talk_lines
from rig.host.preflight import Needs, preflight
from rig.host.topology import Decision
from rig.operations import system
from rigctl.contract import layout
from rigctl.errors import RigctlError
from rigctl.services import status
from rigctl.whole_files import write_json
from tests.support.plans import data
from tests.unit.host_archetypes import TURIN_DIRECT
from tests.unit.serving import fields
from tests.unit.test_families import copied, planned
from tests.unit.test_operations import apply

BESIDE = """
beside:
  release: vllm-0.33.0
  target: kimi-k2.5-int4
  gpus: [6]
  max_running_requests: 8
other:
  extends: beside
  gpus: [7]
  listen: {port: 8001}
below:
  extends: vllm-base
  gpus: [0, 1, 2, 3]
  tensor_parallel: 4
  accept: {unequal_limit: x}
"""


@pytest.fixture(autouse=True)
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = copied(tmp_path)
    path = place / "serving.yaml"
    path.write_text(path.read_text() + BESIDE)
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(place))
    return place


@pytest.mark.parametrize(
    ("named", "starts"),
    [(None, []), ("beside", ["beside"]), (["beside", "other"], ["beside", "other"]), ([], [])],
)
def test_what_starts_at_boot(named: Any, starts: list[str]) -> None:
    assert planned(enable_at_boot=named).data.at_boot == starts


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["beside", "vllm-base"], "beside and vllm-base exclude each other, both claim GPU 6"),
        (["beside", "below"], "beside and below exclude each other, both claim port 8000"),
        (["other", "othr"], "othr is none of this host's configurations"),
        (["other", "other"], "other and other exclude each other"),
        ([1], "enable_at_boot"),
    ],
)
def test_what_cannot_start_together_is_refused(named: Any, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        planned(enable_at_boot=named)


def test_only_what_claims_the_same_excludes_each_other() -> None:
    plan = planned()
    assert "kimi-other.service" not in conflicts(plan, "beside")
    assert {"kimi-below.service", "kimi-vllm-base.service"} <= {*conflicts(plan, "beside")}


def test_the_first_of_them_is_shown_at_the_end_of_a_deploy() -> None:
    lines = talk_lines("h", data("gpu", enable_at_boot=["other", "beside"]))
    assert "systemctl start kimi-other.service" in lines[0]


def findings() -> list[str]:
    serving = load_catalog().serving
    chosen = {name: serving[name] for name in ("beside", "below", "other", "vllm-base")}
    return [str(one) for one in preflight(TURIN_DIRECT, Decision((), (), ()), Needs(serving=chosen, releases={}))]


def test_a_port_that_an_entry_did_not_choose_is_a_finding(inventory: Path) -> None:
    [found] = [one for one in findings() if "port-shared" in one or "cannot run beside" in one]
    assert "beside takes port 8000 because its entry names none, as below on other cards" in found
    assert "listen: {port: 8001}" in found


def test_units_are_enabled_and_disabled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, systemctl = tmp_path / "called", tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    states = "".join(
        f"echo Id=kimi-{name}.service; echo ActiveState=active; echo UnitFileState={state}; echo; "
        for name, state in (("a", "enabled"), ("b", "disabled"), ("c", "disabled"))
    )
    systemctl.write_text(f'#!/bin/sh\ncase "$1" in show) {states};; *) echo "$@" >> {log};; esac\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(systemctl.parent), prepend=":")
    units = [f"kimi-{name}.service" for name in "abc"]
    assert apply(system.enabled_at_boot, wanted=units[1:], units=units)
    assert sorted(log.read_text().splitlines()) == [
        "disable -q kimi-a.service",
        *(f"enable -q {one}" for one in units[1:]),
    ]
    log.unlink()
    assert not apply(system.enabled_at_boot, wanted=units[:1], units=units)


def serve(root: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A host on which these configurations are active."""
    for place in ("CONFIGURATIONS", "RUNTIME", "SERVING"):
        (root / place).mkdir()
        monkeypatch.setattr(layout, place, str(root / place))
    for number, name in enumerate(names):
        order = fields(name=name, port=8000 + number, model=f"model-{name}", gpus=[number])
        write_json(root / "CONFIGURATIONS" / f"{name}.json", order, durable=False)
    active = {"ActiveState": "active", "StatusText": "serving"}
    monkeypatch.setattr(status, "properties", lambda _, wanted: {**dict.fromkeys(wanted, ""), **active})


def test_status_says_which_model_is_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, monkeypatch, "one", "two")
    status.show(argparse.Namespace(json=False))
    shown = capsys.readouterr().out
    assert "model-one at 127.0.0.1:8000, GPUs 0" in shown and "model-two at 127.0.0.1:8001, GPUs 1" in shown
    with pytest.raises(RigctlError, match=r"several configurations are active: one \(127.0.0.1:8000, model-one\), two"):
        status.active()


def test_one_that_is_alone_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, monkeypatch, "one")
    status.show(argparse.Namespace(json=False))
    assert "model-one at" not in capsys.readouterr().out
    assert status.active().name == "one"
