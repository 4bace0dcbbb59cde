"""Units of every shape, as files: whoever changes one sees all that changes.

Base and speculative of each engine, on loopback and on a network; a release that drains by a flag; one whose kernels
are compiled while it serves; the fallback.

`python -m tests.unit.test_golden` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rig.artifacts.units import unit_files
from rig.host.settings import settings_from_gpus
from rig.plan.host_plan import host_plan
from rigctl.contract.layout import UNITS
from tests.support.plans import INVENTORY, catalog, data

GOLDEN = Path(__file__).parent / "golden"
LOOPBACK = {
    "kimi-vllm-base.service",
    "kimi-vllm-eagle3-custom.service",
    "kimi-vllm-base-current.service",
    "kimi-sglang-base.service",
    "kimi-sglang-eagle3-custom.service",
    "kimi-sglang-base-current.service",
    "kimi-fallback@.service",
}
NETWORK = {"kimi-vllm-eagle3-custom.service", "kimi-sglang-base.service"}
SHAPES = {**dict.fromkeys(LOOPBACK, None), **{f"network/{name}": "network.yaml" for name in NETWORK}}
"""Golden file -> overlay that its unit is of."""


def unit(golden: str) -> str:
    """A unit of a host with 8 GPUs, without the digests that environments are named by."""
    host = data(api_key_file="/nonexistent", catalogue_overlay=SHAPES[golden])
    plan = host_plan(host, "ubuntu-24.04", settings_from_gpus(8))
    text = unit_files(plan)[f"{UNITS}/{Path(golden).name}"]
    for environment in plan.environments.values():
        text = text.replace(environment.path.rpartition("/")[2], "<digest>")
    return text


@pytest.mark.parametrize("golden", sorted(SHAPES))
def test_units_are_as_written_down(golden: str) -> None:
    assert unit(golden) == (GOLDEN / golden).read_text(), "meant? `python -m tests.unit.test_golden` writes them anew"


def test_no_golden_file_is_left_over() -> None:
    assert {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.service")} == SHAPES.keys()


def test_the_goldens_have_every_shape() -> None:
    shapes = {(entry.release.partition("-")[0], entry.speculation is not None) for entry in catalog().serving.values()}
    named = {name.removeprefix("kimi-").removesuffix(".service") for name in LOOPBACK}
    goldens = {name: entry for name, entry in catalog().serving.items() if name in named}
    assert {(e.release.partition("-")[0], e.speculation is not None) for e in goldens.values()} == shapes
    assert not any(
        catalog("network.yaml").serving[name].listen.loopback for name in ("vllm-eagle3-custom", "sglang-base")
    )


if __name__ == "__main__":
    os.environ["KIMI_RIG_INVENTORY"] = str(INVENTORY)
    for path in GOLDEN.rglob("*.service"):
        path.unlink()
    for name in SHAPES:
        (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(unit(name))
