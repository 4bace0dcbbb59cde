"""Host: preflight, driver, kernel arguments, module options, sysctls, ACS, governor; and the reboot they may need.

What takes effect at boot is staged and marked pending: no serving unit starts before the running kernel has it.
"""

from pyinfra.api import deploy

from rig.artifacts.disk import disk
from rig.artifacts.host_checks import driver_decision, findings, reboot_due, reboot_reasons
from rig.host.nvidia_driver import Action
from rig.host.system_files import POWER_UNIT, host_files, unwanted_files
from rig.operations import host_settings as operations
from rig.operations.files import present
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan

REBOOT_SECONDS = 1800  # memory training of a host with 24 DIMMs takes many minutes


@deploy("Host")
def host(plan: HostPlan) -> None:
    settings, step = plan.settings, driver_decision(plan)
    files = host_files(settings, plan.facts)
    operations.checked(name="Check what could fail later", findings=findings(plan), account=disk(plan))
    if files:
        present(name="Write host settings", entries=operations.entries(files))
    if plan.facts.gpus:
        operations.driver(
            name="Keep or install the NVIDIA driver",
            step=step,
            packages=plan.data.driver_packages,
            keyring=plan.data.driver_keyring.get(plan.distribution, []),
        )
    operations.retired(name="Remove settings of an earlier decision", files=unwanted_files(files))
    if files:
        operations.taken_over(name="Let the system take over its settings", files=files)
    units = [*settings.boot_units, *([POWER_UNIT] if settings.power_limit_w is not None else [])]
    if units:
        operations.enabled_now(name="Start the host's units, also at boot", units=units)
    why = reboot_reasons(plan, step)
    if plan.data.reboot == "yes" and reboot_due(plan, step):
        ports = sorted({entry.listen.port for entry in plan.serving.values()})
        operations.may_reboot(name="Look for running engines", names=list(plan.serving), ports=ports)
        operations.rebooted(name="Reboot", limit_seconds=REBOOT_SECONDS)
        operations.proved(name="Prove the new boot", settings=plan.decision.settings)
    else:
        installing = step.action is Action.INSTALL
        operations.asks_for_reboot(name="Mark what waits for a reboot", why=why, installing=installing)


if __name__ == "builtins":
    host(plan=current_plan())
