"""Host: preflight, driver, kernel arguments, module options, sysctls, ACS, governor; and the reboot they may need.

What takes effect at boot is staged and marked pending: no serving unit starts before the running kernel has it.
"""

from pyinfra.api import deploy

from rig import layout
from rig.driver import DriverStep, driver_step, minimum_driver
from rig.hostfiles import POWER_UNIT, HostFile, host_files, unwanted_files
from rig.hostplan import HostPlan
from rig.live import reboot_pending
from rig.memory import MIB, Fit, Model, configuration_fit
from rig.operations import host as operations
from rig.operations.files import Directory, File, present
from rig.preflight import Finding, Needs, preflight
from rig.target import current_plan

REBOOT_SECONDS = 1800  # memory training of a host with 24 DIMMs takes many minutes


def findings(plan: HostPlan) -> list[Finding]:
    """What the preflight says of this host and this plan."""
    running = running_configurations(plan)
    needs = Needs(
        serving=plan.serving,
        releases={name: env.release for name, env in plan.environments.items()},
        fits=fits(plan),
        own_ports=frozenset(plan.serving[name].listen.port for name in running),
        may_reboot=plan.data.reboot == "yes",
        driver_upgrade=plan.data.driver_upgrade,
        accept_known_bad=frozenset(plan.data.accept_known_bad),
    )
    return preflight(plan.facts, plan.decision, needs)


def fits(plan: HostPlan) -> tuple[Fit, ...]:
    """The memory account of each configuration whose checkpoints are on the host."""
    models = {path: Model(config, total=size) for path, (config, size) in plan.facts.models.items()}
    memory = min((card.memory_mib for card in plan.decision.cards if card.memory_mib), default=0)
    accounts = []
    for name, entry in plan.serving.items():
        target = models.get(plan.checkpoint_paths[entry.target])
        drafter = models.get(plan.checkpoint_paths[entry.speculation.drafter]) if entry.speculation else None
        whole = target is not None and (drafter is not None or entry.speculation is None)
        if entry.gpus and memory and entry.memory_fraction and target is not None and whole:
            engine = plan.environments[entry.release].release.engine
            budget = int(entry.memory_fraction * memory * MIB)
            accounts.append(configuration_fit(name, entry, engine, budget, (target, drafter)))
    return tuple(accounts)


def running_configurations(plan: HostPlan) -> list[str]:
    """Configurations whose unit is at work."""
    units = plan.facts.units
    return [name for name in plan.serving if (unit := units.get(layout.unit_name(name))) is not None and unit.active]


def driver_decision(plan: HostPlan) -> DriverStep:
    """What is to be done about the driver."""
    minimum = minimum_driver(env.release for env in plan.environments.values())
    running = bool(running_configurations(plan))
    return driver_step(plan.facts, minimum, upgrade=plan.data.driver_upgrade, engine_runs=running)


def reboot_reasons(plan: HostPlan, step: DriverStep) -> list[str]:
    """Why the host must reboot before it serves; empty when it need not."""
    waiting = [f"{one.key} = {one.value}" for one in reboot_pending(plan.decision.settings, plan.facts)]
    return [*([step.reboot] if step.reboot else []), *waiting]


def entries(files: list[HostFile]) -> list[Directory | File]:
    """The files as entries, with the one directory of ours among them."""
    folder = Directory(f"{layout.INSTALL}/libexec", "0755", "root", "root")
    written = [File(one.path, one.text.encode(), one.mode) for one in files]
    return [folder, *written] if any(one.path.startswith(folder.path) for one in files) else [*written]


@deploy("Host")
def host(plan: HostPlan) -> None:
    settings, step = plan.settings, driver_decision(plan)
    files = host_files(settings, plan.facts)
    operations.checked(name="Check what could fail later", findings=findings(plan))
    if files:
        present(name="Write host settings", entries=entries(files))
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
    if why and plan.data.reboot == "yes":
        ports = sorted({entry.listen.port for entry in plan.serving.values()})
        operations.may_reboot(name="Look for running engines", names=list(plan.serving), ports=ports)
        operations.rebooted(name="Reboot", limit_seconds=REBOOT_SECONDS)
        operations.proved(name="Prove the new boot", settings=plan.decision.settings)
    else:
        operations.asks_for_reboot(name="Mark what waits for a reboot", why=why)


if __name__ == "builtins":
    host(plan=current_plan())
