"""Receipt: a record on the host of what is installed and from what."""

from pyinfra.api import deploy

from rig.hostplan import HostPlan
from rig.operations import receipts
from rig.operations.system import reboot_pending
from rig.target import current_plan


@deploy("Receipt")
def receipt(plan: HostPlan) -> None:
    reboot_pending(name="Report a pending reboot")
    receipts.receipt(name="Write the receipt", plan=plan)


if __name__ == "builtins":
    receipt(plan=current_plan())
