"""What kimi-rig ships is sound: relations of inventory/ only. What an entry says is nobody's business here."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from rig.artifacts.checkpoint_orders import unpinned
from rig.artifacts.host_checks import findings
from rig.artifacts.units import unit_files
from rig.bench.sweeps import load_sweeps
from rig.catalog.entries import INVENTORY_VARIABLE, ROOT, check_all, load_catalog, overlays
from rig.plan.host_plan import plan_from_facts, refuse_unknown
from rig.plan.model_defaults import defaults_json
from rigctl.contract.limits import Limits
from tests.support.plans import SHIPPED
from tests.unit.host_archetypes import TURIN_DIRECT


def group_data(name: str) -> dict[str, Any]:
    found = runpy.run_path(str(SHIPPED / "group_data" / f"{name}.py"))
    return {key: value for key, value in found.items() if not key.startswith("_")}


def test_the_catalogues_are_right_under_every_overlay() -> None:
    check_all(SHIPPED)


def test_the_sweeps_are_right() -> None:
    assert load_sweeps(SHIPPED)


@pytest.mark.parametrize("name", [path.stem for path in (SHIPPED / "group_data").glob("*.py")])
def test_host_data_has_known_keys_only(name: str) -> None:
    refuse_unknown(group_data(name))


def test_every_threshold_is_documented() -> None:
    assert group_data("all")["supervision"].keys() == Limits.model_fields.keys()


def test_a_host_data_file_names_what_its_overlay_has() -> None:
    for path in (SHIPPED / "group_data").glob("*.py"):
        data = group_data(path.stem)
        overlay = data.get("catalogue_overlay")
        assert overlay in overlays(SHIPPED)
        assert set(data.get("configurations") or ()) <= load_catalog(overlay, SHIPPED).serving.keys()


UNPROVED = [name for name, entry in load_catalog(None, SHIPPED).serving.items() if entry.unproved]


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_unproved_is_planned_by_name_alone_and_refused_until_it_is_pinned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INVENTORY_VARIABLE, str(SHIPPED))
    assert name not in plan_from_facts(group_data("all"), TURIN_DIRECT).serving
    plan = plan_from_facts(group_data("all") | {"configurations": [name]}, TURIN_DIRECT)
    assert unit_files(plan)
    # Each default is explained, and its value stands where the explanation says.
    for one in defaults_json(plan)[name].values():
        file, _, line = one["source"].rpartition(":")
        assert str(one["value"]).lower() in (ROOT / file).read_text().splitlines()[int(line) - 1].lower()
    [found] = [one for one in findings(plan) if one.code == "unproved"]
    pinned = not any(unpinned(entry) for entry in plan.checkpoints.values())
    assert found.severity == ("warning" if pinned else "error")


def test_models_beside_each_other_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one card or two have a port each."""
    monkeypatch.setenv(INVENTORY_VARIABLE, str(SHIPPED))
    serving = load_catalog(None, SHIPPED).serving
    small = {name: serving[name] for name in UNPROVED if len(serving[name].gpus) < 8}
    assert len({entry.listen.port for entry in small.values()}) == len({entry.target for entry in small.values()})
    alone = {entry.gpus[0]: name for name, entry in small.items() if len(entry.gpus) == 1}
    named = {"configurations": [*alone.values()], "enable_at_boot": [*alone.values()]}
    assert len(plan_from_facts(group_data("all") | named, TURIN_DIRECT).data.at_boot) == len(alone) > 1
