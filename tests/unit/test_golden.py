"""The unit of every serving configuration, as a file: whoever changes one sees all that changes.

`python -m tests.unit.test_golden` writes them anew.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from rig.artifacts.units import unit_files
from rig.catalog.entries import ROOT
from rig.host.settings import settings_from_gpus
from rig.plan.host_plan import host_plan
from rigctl.contract.layout import UNITS
from rigctl.contract.limits import Limits

GOLDEN = Path(__file__).parent / "golden"


def group_data() -> dict[str, Any]:
    found = runpy.run_path(str(ROOT / "inventory" / "group_data" / "all.py"))
    return {key: value for key, value in found.items() if not key.startswith("_")}


def units() -> dict[str, str]:
    """File name -> text of all units of a host with 8 GPUs, without the digests that environments are named by."""
    plan = host_plan(group_data() | {"api_key_file": "/nonexistent"}, "ubuntu-24.04", settings_from_gpus(8))
    digests = {env.path.rpartition("/")[2] for env in plan.environments.values()}
    files = {Path(path).name: text for path, text in unit_files(plan).items() if path.startswith(f"{UNITS}/")}
    for digest in digests:
        files = {name: text.replace(digest, "<digest>") for name, text in files.items()}
    return files


@pytest.mark.parametrize("name", sorted(units()))
def test_units_are_as_written_down(name: str) -> None:
    assert units()[name] == (GOLDEN / name).read_text(), "meant? `python -m tests.unit.test_golden` writes them anew"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == units().keys()
    assert len(units()) == 12 + 1, "one a configuration, and the fallback"


def test_the_documented_thresholds_are_the_defaults() -> None:
    assert group_data()["supervision"] == Limits().model_dump()


if __name__ == "__main__":
    for path in GOLDEN.glob("*"):
        path.unlink()
    GOLDEN.mkdir(exist_ok=True)
    for name, text in units().items():
        (GOLDEN / name).write_text(text)
