"""Train: one training of a host from its first step to its entries in the catalogues (`make train`)."""

from pathlib import Path

from pyinfra import host, logger
from pyinfra.api import deploy
from pyinfra.api.exceptions import PyinfraError

from rig.artifacts.published import Receipt, write_entries
from rig.catalog.entries import inventory_directory
from rig.operations import training as operations
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan
from rigctl.contract.order import ContractError


@deploy("Train")
def train(plan: HostPlan) -> None:
    name = str(host.data.get("train") or "")
    if name not in plan.trainings:
        there = ", ".join(plan.trainings) or "none"
        raise PyinfraError(f"{host.name}: {name} is none of its trainings (`trainings` in its data: {there})")
    entry = plan.trainings[name]

    def keep(text: str) -> None:
        try:
            receipt = Receipt.of(text, f"the receipt of {name}")
        except ContractError as error:
            raise PyinfraError(f"{host.name}: {error}") from None
        for path in write_entries(Path(inventory_directory()), receipt, entry):
            logger.info(f"{host.print_prefix}{path} has {entry.publish}")

    operations.trained(name=f"Train {name}", training=name)
    operations.published(
        name=f"Publish {entry.publish}", training=name, path=f"{plan.data.drafters}/{entry.publish}", keep=keep
    )


if __name__ == "builtins":
    train(plan=current_plan())
