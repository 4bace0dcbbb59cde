"""Neighbours: what serves on this host already and is not ours. Reported by plan and deploy, never touched."""

from pyinfra.api import deploy

from rig.operations.system import neighbours_told
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan


@deploy("Neighbours")
def neighbours(plan: HostPlan) -> None:
    neighbours_told(name="Look for servers that are not ours", plan=plan)


if __name__ == "builtins":
    neighbours(plan=current_plan())
