"""Receipt: a record on the host of what is installed and from what."""

from pyinfra.api import deploy

from rig.operations import receipt as operations
from rig.operations.system import reboot_pending
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan


@deploy("Receipt")
def receipt(plan: HostPlan) -> None:
    reboot_pending(name="Report a pending reboot")
    operations.receipt(name="Write the receipt", plan=plan)


if __name__ == "builtins":
    receipt(plan=current_plan())
