"""Base: the deploy lock, packages, the service user, directories, secrets."""

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.exceptions import PyinfraError

from rig.artifacts.rollback_states import state_of
from rig.operations import receipt, rollback_states
from rig.operations.base_paths import SYSUSERS, base_paths
from rig.operations.deploy_lock import deploy_lock
from rig.operations.edge import engine_key
from rig.operations.files import present, secret
from rig.operations.system import packages, system_users
from rig.plan.current import current_plan, operator_secret
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.order import ContractError


@deploy("Base")
def base(plan: HostPlan) -> None:
    deploy_lock(name="Hold the deploy lock")
    receipt.readable(name="Look for a newer version")
    again = plan.data.roll_forward == "yes"
    try:
        state = state_of(plan)
    except ContractError as error:
        raise PyinfraError(f"{host.name}: {error}") from None
    rollback_states.wanted(name="Respect a rollback", record=state, roll_forward=again)
    packages(name="Install packages", names=plan.packages)
    if plan.edge is not None:
        packages(name="Install HAProxy", names=plan.edge.packages, masked="haproxy")
    present(name="Make directories", entries=base_paths(plan))
    users = [plan.data.service_user, layout.BUILDER]
    system_users(name=f"Create users {' and '.join(users)}", users=users, declaration=SYSUSERS)
    for what, file in plan.secrets.items():
        secret(name=f"Store the {what}", path=f"{layout.CREDENTIALS}/{what}", content=operator_secret(file, what))
    if plan.edge is not None:
        engine_key(name="Make the engines' key")


if __name__ == "builtins":  # run by pyinfra as a deploy of its own
    base(plan=current_plan())
