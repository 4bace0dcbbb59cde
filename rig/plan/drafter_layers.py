"""The drafters of a host's configurations: what they were trained on, and which layers their engine will feed them.

Pure: from the catalogues. What the files themselves say is validated on the host (`rigctl checkpoints pairs`).
"""

from collections.abc import Iterator
from typing import Any

from rig.catalog.entries import Checkpoint, Configuration
from rig.plan.host_plan import HostPlan, overlay_path, writes_ids
from rigctl.contract.eagle3_conventions import MISMATCH, Engine, trained_input_ids


def drafters_json(plan: HostPlan) -> list[dict[str, Any]]:
    """One object a configuration with a drafter."""
    return [_object(plan, name, one, one.drafter) for name, one in plan.serving.items() if one.drafter]


def _object(plan: HostPlan, name: str, configuration: Configuration, drafter: str) -> dict[str, Any]:
    entry = plan.checkpoints[drafter]
    release = plan.environments[configuration.release].release
    trained = _input_ids(entry)
    written = trained is not None and writes_ids(entry)
    return {
        "configuration": name,
        "drafter": drafter,
        "trained_for": entry.training.target,
        "target": configuration.target,
        "convention": entry.training.convention,
        "trained_on_inputs_of": trained,
        "written": Engine(release.engine, release.version).wanted_keys(trained or []) if written else None,
        "written_to": f"{overlay_path(drafter, configuration.release)}/config.json" if written else None,
        "provenance": entry.provenance.model_dump(exclude_none=True),
    }


def _input_ids(entry: Checkpoint) -> list[int] | None:
    """The layers whose inputs it was trained on, where the entry says so itself."""
    if entry.training.layer_ids is None:
        return None
    return trained_input_ids(entry.training.convention, entry.training.layer_ids, layers=0)


def drafters_text(plan: HostPlan) -> str:
    """The section of `make explain`; empty without drafters."""
    found = drafters_json(plan)
    if not found:
        return ""
    return "\n".join(["", "Drafters", "--------", *(line for one in found for line in _lines(one))]) + "\n"


def _lines(one: dict[str, Any]) -> Iterator[str]:
    yield f"{one['configuration']} = {one['drafter']}"
    if one["trained_for"] not in (None, one["target"]):
        yield f"    WARNING: trained for {one['trained_for']}, used with {one['target']};"
        yield f"    {MISMATCH}"
    if one["written"] is not None:
        yield f"    trained on the inputs of layers {one['trained_on_inputs_of']} ({one['convention']} ids); the engine"
        yield f"    reads {one['written']} in {one['written_to']}"
    elif one["convention"] == "unknown":
        yield "    layer id convention UNKNOWN: the engine takes the ids of its config.json as they are, or its default"
    else:
        yield f"    layer ids by convention {one['convention']}, from its config.json; nothing is written"
    if one["provenance"]:
        yield "    " + ", ".join(f"{key} {value}" for key, value in one["provenance"].items())
