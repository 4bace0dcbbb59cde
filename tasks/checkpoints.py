"""Checkpoints: the model and the drafters that this host's configurations use."""

from pyinfra.api import deploy

from rig.hostplan import HostPlan
from rig.operations.checkpoints import checkpoint
from rig.target import current_plan


@deploy("Checkpoints")
def checkpoints(plan: HostPlan) -> None:
    for name, entry in plan.checkpoints.items():
        checkpoint(name=f"Stage {name}", checkpoint_name=name, entry=entry, path=plan.checkpoint_paths[name])


if __name__ == "builtins":
    checkpoints(plan=current_plan())
