"""What kimi-rig ships is sound: relations of inventory/ only. What an entry says is nobody's business here."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from rig.bench.sweeps import load_sweeps
from rig.catalog.entries import check_all, load_catalog, overlays
from rig.plan.host_plan import refuse_unknown
from rigctl.contract.limits import Limits
from tests.support.plans import SHIPPED


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
