"""Checkpoints: the model and the drafters that this host's configurations use, and whether they fit each other."""

from pyinfra.api import deploy

from rig.artifacts.canary import canary_files
from rig.artifacts.checkpoint_orders import checkpoint_files
from rig.artifacts.units import pairs
from rig.operations.checkpoints import checkpoint, drafters_fit
from rig.operations.files import File, present
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan


@deploy("Checkpoints")
def checkpoints(plan: HostPlan) -> None:
    files = [File(path, content) for path, content in {**checkpoint_files(plan), **canary_files(plan)}.items()]
    present(name="Describe checkpoints", entries=files)
    for name, entry in plan.checkpoints.items():
        checkpoint(
            name=f"Stage {name}",
            checkpoint_name=name,
            entry=entry,
            path=plan.checkpoint_paths[name],
            hub_token=plan.data.hub_token_file is not None,
        )
    drafters_fit(name="Check that drafters fit", order=pairs(plan))


if __name__ == "builtins":
    checkpoints(plan=current_plan())
