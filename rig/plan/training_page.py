"""The trainings of a host for `make explain`: what they make of what, what they claim, whence each figure. Pure."""

from collections.abc import Iterator
from typing import Any

from rig.plan.host_plan import HostPlan
from rigctl.contract.training_job import BYTES_A_VALUE


def trainings_json(plan: HostPlan) -> list[dict[str, Any]]:
    """One object a training that the host's data names. Lengths are tokens, sizes bytes."""
    return [_object(plan, name) for name in plan.trainings]


def _object(plan: HostPlan, name: str) -> dict[str, Any]:
    entry = plan.trainings[name]
    extraction = plan.serving[entry.states.configuration].speculation
    layers = extraction.layers if extraction else None
    hidden = plan.checkpoints[entry.target].shape.get("hidden_size")
    given = entry.model_fields_set
    return {
        "name": name,
        "publishes": entry.publish,
        "target": entry.target,
        "start": entry.start,
        "trainer": entry.trainer,
        "gpus": entry.gpus,
        "configurations": entry.configurations,
        "conversations": entry.ladder,
        "prompts": [one.model_dump() for one in entry.prompts.files],
        "tokens": {
            "value": entry.ladder[-1] * entry.tokens_a_row,
            "source": "training.yaml" if "tokens_a_row" in given else "February 2026, 1,444 a conversation",
        },
        "rate": {
            "value": entry.rate,
            "source": "training.yaml" if "rate" in given else "February 2026, eight cards",
        },
        "bytes_a_token": hidden * len(layers) * BYTES_A_VALUE if layers and isinstance(hidden, int) else None,
        "disk_limit": entry.states.disk_limit,
        "directory": f"{plan.data.training}/{name}",
    }


def trainings_text(plan: HostPlan) -> str:
    """The section of `make explain`; empty without trainings."""
    lines = [line for one in trainings_json(plan) for line in _lines(one)]
    return "\n".join(["", "Trainings", "---------", *lines]) + "\n" if lines else ""


def _lines(one: dict[str, Any]) -> Iterator[str]:
    yield f"{one['name']} = {one['publishes']}, from {one['start'] or 'an untrained drafter'}, for {one['target']}"
    cards = f"GPU {', '.join(map(str, one['gpus']))}" if one["gpus"] else "the processor"
    yield f"    claims {cards}: what serves there stops meanwhile, and serves again afterwards"
    yield f"    asks {', '.join(one['configurations'])}; trained by {one['trainer']}"
    tokens, rate = one["tokens"], one["rate"]
    yield f"    {one['conversations'][-1]:,} conversations, about {tokens['value']:,} tokens ({tokens['source']})"
    hours = tokens["value"] / rate["value"] / 3600
    yield f"    extraction: about {hours:,.1f} h at {rate['value']:,.0f} tok/s ({rate['source']})"
    if one["bytes_a_token"]:
        size = tokens["value"] * one["bytes_a_token"]
        yield f"    states: {size / 1e9:,.2f} GB ({one['bytes_a_token']:,} bytes a token)"
        yield f"    at most {one['disk_limit'] / 1e9:,.0f} GB of them at once, in {one['directory']}"
    for prompts in one["prompts"]:
        yield f"    prompts: {prompts['file']} ({prompts['licence']}, {prompts['provenance']})"
    yield "    the host's own figures, once it has some: `rigctl train plan` there"
