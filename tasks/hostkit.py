"""Hostkit: the program that lives on the host (rigctl)."""

from pyinfra.api import deploy

from rig.operations import hostkit as operations
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan


@deploy("Hostkit")
def hostkit(plan: HostPlan) -> None:
    operations.installed(name="Install rigctl", plan=plan)


if __name__ == "builtins":
    hostkit(plan=current_plan())
