"""Training: what a host needs to make drafters of its own: directories, prompts, orders. Nothing is started."""

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.exceptions import PyinfraError

from rig.artifacts.training_orders import prompt_files, training_files
from rig.catalog.yaml_source import CatalogError
from rig.operations import training as operations
from rig.operations.files import Directory, File, present
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.order import ContractError


@deploy("Training")
def training(plan: HostPlan) -> None:
    operations.retired(name="Remove orders of other trainings", keep=list(plan.trainings))
    if not plan.trainings:
        return
    user, root = plan.data.service_user, plan.data.training
    try:
        orders, prompts = training_files(plan), prompt_files(plan)
    except (CatalogError, ContractError) as error:
        raise PyinfraError(f"{host.name}: {error}") from None
    staging = sorted({f"{root}/staging/{entry.target}" for entry in plan.trainings.values()})
    filled = [*(f"{root}/{name}" for name in plan.trainings), *staging]
    directories = [
        # What is in them is the service user's; nobody but root exchanges one for another.
        *(Directory(path, "0755", "root", "root") for path in (root, f"{root}/staging", layout.TRAINING)),
        *(Directory(path, "0750", user, user) for path in filled),
        *(Directory(f"{layout.TRAINING}/{name}.prompts", "0750", "root", user) for name in plan.trainings),
    ]
    operations.owned(name="List directories of trainings", paths=filled)
    present(name="Make directories of trainings", entries=directories)
    present(
        name="Write prompts",
        entries=[File(path, content, mode="0640", group=user) for path, content in prompts.items()],
    )
    present(name="Describe trainings", entries=[File(path, content) for path, content in orders.items()])


if __name__ == "builtins":
    training(plan=current_plan())
