"""States of a host that a rollback can return to: environments, units and flags of one deploy, together. Pure.

A deploy records its state before it writes units. The host keeps the latest (rigctl prune says which).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rig.artifacts.kernel_orders import (
    kernel_files,
    kernel_job,
    kernel_job_path,
    kernels,
    root,
    toolchains,
)
from rig.artifacts.receipt import receipt_items
from rig.artifacts.units import run_specification, unit_files
from rig.plan.host_plan import HostPlan, canonical_digest
from rigctl.contract import layout
from rigctl.contract.run_specification import RunSpecification

FORMAT = 1


def state_of(plan: HostPlan) -> dict[str, Any]:
    """All that a rollback puts back.

    id: 12 hex digits over the rest. environments: release -> path. units: configuration -> digest of its run
    specification. files: path -> text. kernels: release -> its kernel library, which the same environment may have had
    otherwise; kernel_files: their descriptions, path -> text. items: entries of the receipt.
    """
    items = receipt_items(plan, "")
    libraries = {
        name: {
            "kernel": kernel.model_dump(mode="json"),
            "description": kernel_job_path(name),
            "digest": kernel_job(plan, name).digest,
            "trees": [root(plan), toolchains(plan)],
        }
        for name, (_, kernel) in kernels(plan).items()
    }
    content: dict[str, Any] = {
        "format": FORMAT,
        "environments": {name: env.path for name, env in plan.environments.items()},
        "units": {name: run_specification(plan, name).digest for name in plan.serving},
        "files": dict(unit_files(plan)),
        "kernels": libraries,
        "kernel_files": {path: text.decode() for path, text in kernel_files(plan).items()},
        "items": {key: item for key, item in items.items() if of_state(key)},
    }
    return {"id": canonical_digest(content)[:12], **content}


def known_as(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Configuration -> every digest of its unit. The state may be of an earlier version. Raises ContractError."""
    paths = {name: layout.specification_path(name) for name in state["units"]}
    return {
        name: RunSpecification.parse_text(state["files"].get(path, ""), path).known_as for name, path in paths.items()
    }


def of_state(item: str) -> bool:
    """Whether an item of the receipt is part of a state."""
    return item.startswith(("environment/", "kernel/", "unit/")) or item == "edge"


def state_file(identity: str) -> str:
    return f"{layout.STATES}/{identity}.json"


def present_after(
    identity: str, rolled_back_from: Sequence[str], way: Sequence[str], *, at: str, by: str
) -> dict[str, Any]:
    """Content of the file that says which state is in place, from which it was rolled back, and which came before."""
    return {"id": identity, "rolled_back_from": list(rolled_back_from), "before": list(way), "at": at, "by": by}


def before(present: Any, identities: Sequence[str]) -> list[str]:
    """The states that were in force before the present one, the last first.

    identities: all that the host still has.
    """
    way = present.get("before") if isinstance(present, Mapping) else None
    return [one for one in way if one in identities] if isinstance(way, list) else []


def way_to(present: Any, identities: Sequence[str], identity: str, left: Sequence[str] = ()) -> list[str]:
    """What was in force before `identity` once it takes the place of the present state; left: what it takes back."""
    earlier = before(present, identities)
    if left:
        earlier = earlier[earlier.index(identity) + 1 :] if identity in earlier else earlier
    elif isinstance(present, Mapping) and present.get("id"):
        earlier = [present["id"], *earlier]
    return [one for one in dict.fromkeys(earlier) if one != identity and one not in left][: layout.STATES_KEPT]


def rolled_back(present: Any) -> bool:
    """Whether a rollback is in force. present: content of the file, or None."""
    return isinstance(present, Mapping) and bool(present.get("rolled_back_from"))


class NoState(Exception):
    """There is no state to return to; the message says why."""


def target(present: Any, identities: Sequence[str], to: str | None) -> str:
    """The state to return to: `to`, or the one that was in force before the present one. Raises NoState.

    identities: of the states on the host, newest first.
    """
    if not isinstance(present, Mapping) or not present.get("id"):
        raise NoState("no deploy has recorded a state here yet")
    if to is not None:
        if to not in identities:
            there = ", ".join(identities)
            raise NoState(f"there is no state {to} on it (there are, newest first: {there})")
        return to
    earlier = before(present, identities)
    if not earlier:
        raise NoState(f"there is no state before {present['id']} on it")
    return earlier[0]


def left_behind(present: Mapping[str, Any], identities: Sequence[str], to: str) -> list[str]:
    """States that a return to `to` takes back: what was in place or had been taken back before, and is newer."""
    newer = identities[: identities.index(to)] if to in identities else []
    return [one for one in dict.fromkeys([*(present.get("rolled_back_from") or ()), present["id"]]) if one in newer]


def taken_back(present: Any, identity: str) -> bool:
    """Whether this is a state that the host was rolled back from."""
    return rolled_back(present) and identity in present["rolled_back_from"]


def rollback_text(present: Mapping[str, Any]) -> str:
    """The rollback in force, for status and verification."""
    return (
        f"rolled back to state {present['id']} on {present['at']} by {present['by']}; the catalogue's state comes back "
        'with another catalogue, or with roll_forward = "yes"'
    )
