"""The catalogues and host data of the tests, and plans made of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from rig.catalog.entries import ROOT, Catalog, load_catalog
from rig.host.settings import HostSettings, settings_from_gpus
from rig.plan.host_plan import HostPlan, host_plan

INVENTORY = Path(__file__).parent / "inventory"
GROUP_DATA = INVENTORY / "group_data"
SHIPPED = ROOT / "inventory"
"""The catalogues that kimi-rig ships: a test asserts relations of them, never what an entry says."""


def catalog(overlay: str | None = None) -> Catalog:
    """The tests' own catalogues, also before a fixture has named them."""
    return load_catalog(overlay, INVENTORY)


def data(*groups: str, **more: Any) -> dict[str, Any]:
    """Host data as pyinfra would merge it from group_data."""
    merged: dict[str, Any] = {}
    for group in ("all", *groups):
        merged |= runpy.run_path(str(GROUP_DATA / f"{group}.py"))
    return {key: value for key, value in merged.items() if not key.startswith("_")} | more


def gpu_plan(**more: Any) -> HostPlan:
    return host_plan(data("gpu", **more), "ubuntu-24.04", settings_from_gpus(8))


def box_plan(**more: Any) -> HostPlan:
    return host_plan(data("sandbox", **more), "debian-12", HostSettings())
