"""The host's receipt: what is installed, from which inputs, since when. Pure."""

from collections.abc import Mapping
from typing import Any

from rig.artifacts.edge import edge_files
from rig.artifacts.kernel_orders import kernel_job
from rig.artifacts.units import run_specification
from rig.plan.host_plan import HostPlan, canonical_digest
from rigctl.contract import layout

FORMAT = 1


def receipt_items(plan: HostPlan, hostkit: str) -> dict[str, dict[str, Any]]:
    """Item id -> its inputs, for everything a deploy installs. hostkit: path of the installed version."""
    items: dict[str, dict[str, Any]] = {
        "hostkit": {"path": hostkit},
        "packages": {"names": plan.packages},
        "user": {"name": plan.data.service_user},
    }
    for name, env in plan.built.items():
        items[f"environment/{name}"] = {"path": env.path, "lock": env.lock, "python": env.python}
        if env.release.kernel is not None:
            kernel = env.release.kernel
            items[f"kernel/{name}"] = {"package": kernel.package, "specification": kernel_job(plan, name).digest}
    for name, checkpoint in plan.checkpoints.items():
        items[f"checkpoint/{name}"] = {
            "path": plan.checkpoint_paths[name],
            "role": checkpoint.role,
            "source": checkpoint.source.model_dump(exclude_none=True),
        }
    for name in plan.serving:
        items[f"unit/{layout.unit_name(name)}"] = {"digest": run_specification(plan, name).digest}
    if plan.edge is not None:
        items["edge"] = {"digest": canonical_digest(edge_files(plan))}
    return items


def merged(
    old: Any, items: Mapping[str, Mapping[str, Any]], *, now: str, by: str, version: str
) -> dict[str, Any] | None:
    """The receipt to write, or None when `old` says the same. An item that did not change keeps its `since`."""
    before: Mapping[str, Any] = {}
    if isinstance(old, dict) and old.get("format") == FORMAT and isinstance(old.get("items"), dict):
        before = old["items"]
    if before.keys() == items.keys() and all(_without_since(before[key]) == items[key] for key in items):
        return None
    dated = {
        key: {**item, "since": before[key]["since"] if _without_since(before.get(key)) == item else now}
        for key, item in items.items()
    }
    return {"format": FORMAT, "product": "kimi-rig", "version": version, "by": by, "at": now, "items": dated}


def _without_since(item: Any) -> Any:
    return {key: value for key, value in item.items() if key != "since"} if isinstance(item, dict) else None
