"""What the configurations of a host leave to the family and the checkpoints: each value and its source. Pure."""

from functools import reduce
from typing import Any

from rig.plan.host_plan import HostPlan


def defaults_json(plan: HostPlan) -> dict[str, dict[str, dict[str, Any]]]:
    """By configuration and key: the value, and file and line that it stands in."""
    return {
        name: {
            key: {"value": reduce(_part, key.split("."), plan.serving[name]), "source": str(place)}
            for key, place in plan.defaults[name].items()
        }
        for name in plan.serving
        if plan.defaults.get(name)
    }


def _part(whole: Any, key: str) -> Any:
    return whole.get(key) if isinstance(whole, dict) else getattr(whole, key)


def defaults_text(plan: HostPlan) -> str:
    """The section of `make explain`; empty where every entry says all itself."""
    lines: dict[str, list[str]] = {}
    for name, found in defaults_json(plan).items():
        for key, one in found.items():
            lines.setdefault(f"{key} = {one['value']} ({one['source']})", []).append(name)
    if not lines:
        return ""
    told = (f"{line}\n    {', '.join(names)}" for line, names in sorted(lines.items()))
    return "\n".join(["", "Defaults of models", "------------------", *told]) + "\n"
