"""Hostkit: the program that lives on the host (rigctl)."""

from pyinfra.api import deploy

from rig.hostplan import HostPlan
from rig.operations import hostkit as operations
from rig.target import current_plan


@deploy("Hostkit")
def hostkit(plan: HostPlan) -> None:
    operations.installed(name="Install rigctl", wheels=plan.data.wheels)


if __name__ == "builtins":
    hostkit(plan=current_plan())
