"""Rollback: environments, units and flags of an earlier deploy, together (rig/cli/rollback.py runs this)."""

from pathlib import PurePosixPath
from typing import Any

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.exceptions import PyinfraError

from rig.artifacts.edge import certification
from rig.artifacts.rollback_states import FORMAT, NoState, known_as, left_behind, state_file, target, way_to
from rig.catalog.entries import Kernel
from rig.facts.state import JsonFile, Lines
from rig.operations import rollback_states, system
from rig.operations.deploy_lock import deploy_lock
from rig.operations.edge import certified, running
from rig.operations.files import File, present
from rig.operations.kernel_wheels import kernel
from rig.plan.current import check_privilege
from rigctl.contract import layout
from rigctl.contract.order import ContractError


def chosen_state() -> tuple[dict[str, Any], list[str], list[str]]:
    """The state to return to, the ids of those that are left for it and of those before it. Raises PyinfraError."""
    record = host.get_fact(JsonFile, path=layout.PRESENT_STATE)
    identities = rollback_states.states_of(host.get_fact(Lines, script=rollback_states.LISTED))
    to = host.data.get("rollback_to")
    if host.data.get("rollback_again") and isinstance(record, dict):
        to = record.get("id")
    try:
        identity = target(record, identities, str(to) if to else None)
    except NoState as error:
        raise PyinfraError(f"{host.name}: nothing to roll back to: {error}") from None
    state = host.get_fact(JsonFile, path=state_file(identity))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise PyinfraError(f"{host.name}: {state_file(identity)} is damaged, or of another version of kimi-rig")
    left = left_behind(record, identities, identity)
    return state, left, way_to(record, identities, identity, left)


def kernels_restored(state: dict[str, Any]) -> None:
    """Before units change: a kernel library is not exchanged under an engine that runs, and then all stays as it is."""
    described = [File(path, text.encode()) for path, text in state.get("kernel_files", {}).items()]
    if described:
        present(name="Describe its kernel libraries", entries=described)
    for release, library in state.get("kernels", {}).items():
        wanted = Kernel.model_validate(library["kernel"])
        kernel(
            name=f"Return to its {wanted.package} of {release}",
            release=release,
            wanted=wanted,
            path=library["description"],
            digest=library["digest"],
            trees=library["trees"],
        )


@deploy("Rollback")
def rollback(state: dict[str, Any], left: list[str], way: list[str]) -> None:
    units = [layout.unit_name(name) for name in state["units"]]
    units += sorted(name for path in state["files"] if (name := PurePosixPath(path).name).startswith(system.EDGE_UNITS))
    try:
        digests = known_as(state)
    except ContractError as error:
        raise PyinfraError(
            f"{host.name}: state {state['id']} cannot come back: {error}, or name another state (TO=...)"
        ) from None
    deploy_lock(name="Hold the deploy lock")
    rollback_states.restorable(name="Look for its environments", record=state)
    kernels_restored(state)
    rollback_states.linked(name="Point to its environments", record=state)
    files = [File(path, text.encode()) for path, text in state["files"].items()]
    present(name="Write its units", entries=files)
    system.retired_units(name="Remove units it does not have", keep=[*units, layout.FALLBACK_UNIT])
    system.units_loaded(name="Load units into systemd", units=units, files=files)
    if issued := certification(state["files"]):
        certified(name="Certify the edge", command=issued[0], path=issued[1])
    if read := [file for file in files if file.path.startswith(f"{layout.EDGE}/")]:
        running(name="Let the edge serve", files=read)
    restart = host.data.get("restart") or "never"
    system.running_current(name="Bring running services back", digests=digests, restart=restart)
    rollback_states.returned(name="Write it down", record=state, left=left, way=way)


if __name__ == "builtins":
    check_privilege()
    chosen, others, earlier = chosen_state()
    rollback(state=chosen, left=others, way=earlier)
