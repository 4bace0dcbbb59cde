"""Base: the deploy lock, packages, the service user, directories, secrets."""

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.exceptions import PyinfraError

from rig.artifacts.rollback_states import state_of
from rig.operations import receipt, rollback_states
from rig.operations.deploy_lock import deploy_lock
from rig.operations.files import Directory, File, Link, present, secret
from rig.operations.system import packages, system_user
from rig.plan.current import current_plan, operator_secret
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.order import ContractError

SYSUSERS = "/etc/sysusers.d/kimi-rig.conf"


def base_paths(plan: HostPlan) -> list[Directory | File | Link]:
    """Directories and files every host gets. Those that may be the operator's have no owner or mode of ours."""
    user = plan.data.service_user
    declaration = f'u {user} - "Kimi-K2.5 serving (kimi-rig)" / /usr/sbin/nologin\n'
    return [
        *(Directory(path, "0755", "root", "root") for path in (layout.INSTALL, layout.HOSTKIT, layout.ETC)),
        *(Directory(path, "0755", "root", "root") for path in (layout.CONFIGURATIONS, layout.LOCKS, layout.STATE)),
        *(Directory(path, "0755", "root", "root") for path in (layout.CACHE, layout.LOGS)),
        Directory(layout.CREDENTIALS, "0700", "root", "root"),
        Directory(plan.data.ml_env),
        Directory(plan.data.models),
        Directory(plan.data.drafters),
        File(SYSUSERS, declaration.encode()),
        Link(layout.RIGCTL_LINK, layout.RIGCTL),
    ]


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
    present(name="Make directories", entries=base_paths(plan))
    system_user(name=f"Create user {plan.data.service_user}", user=plan.data.service_user, declaration=SYSUSERS)
    secrets = {"api-key": plan.data.api_key_file, "hub-token": plan.data.hub_token_file}
    for what, file in secrets.items():
        if file is not None:
            secret(name=f"Store the {what}", path=f"{layout.CREDENTIALS}/{what}", content=operator_secret(file, what))


if __name__ == "builtins":  # run by pyinfra as a deploy of its own
    base(plan=current_plan())
