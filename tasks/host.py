"""Host: preflight, driver, kernel arguments, module options, sysctls, ACS, governor; and the reboot they may need.

What takes effect at boot is staged and marked pending: no serving unit starts before the running kernel has it.
"""

from collections.abc import Iterator

from pyinfra.api import deploy

from rig.artifacts.checkpoint_orders import expected_bytes
from rig.host.live_settings import reboot_pending
from rig.host.memory_fit import MIB, Fit, Model, configuration_fit
from rig.host.nvidia_driver import Action, DriverStep, driver_step, minimum_driver
from rig.host.preflight import SHM, Finding, Needs, preflight
from rig.host.system_files import POWER_UNIT, HostFile, host_files, unwanted_files
from rig.operations import host_settings as operations
from rig.operations.files import Directory, File, present
from rig.plan.current import current_plan
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout

# Unpacked, with pip's copies while it is made (docs/host.md).
ENVIRONMENT_BYTES = {"cuda": 12_000_000_000, "cpu": 3_000_000_000}
REBOOT_SECONDS = 1800  # memory training of a host with 24 DIMMs takes many minutes


def findings(plan: HostPlan) -> list[Finding]:
    """What the preflight says of this host and this plan."""
    running = running_configurations(plan)
    accounts, unknown = fits(plan)
    kernels = [env.release.kernel for env in plan.environments.values() if env.release.kernel]
    brought = {kernel.toolchain.cuda_home for kernel in kernels if kernel.toolchain.packages}
    needs = Needs(
        serving=plan.serving,
        releases={name: env.release for name, env in plan.environments.items()},
        space=space(plan),
        fits=accounts,
        not_accounted=unknown,
        # One that a later stage installs is not there yet.
        cuda_home=None if plan.data.cuda_home in brought else plan.data.cuda_home,
        without_nvcc=tuple(
            name
            for name, env in plan.environments.items()
            if env.release.accelerator == "cuda" and not env.carries_nvcc and not (env.cuda_home or env.release.kernel)
        ),
        own_ports=frozenset(plan.serving[name].listen.port for name in running),
        must_reach=frozenset(plan.data.probes),
        may_reboot=plan.data.reboot == "yes",
        driver_upgrade=plan.data.driver_upgrade,
        accept_known_bad=frozenset(plan.data.accept_known_bad),
    )
    return preflight(plan.facts, plan.decision, needs)


def space(plan: HostPlan) -> dict[str, int]:
    """Bytes that a deploy has yet to write, by the path whose free space was read; nothing where none was."""
    if not plan.facts.paths:
        return {}
    asked = [path for path in plan.facts.paths if path not in ("/", SHM)]
    needed: dict[str, int] = {}
    for path, size in _yet_to_write(plan):
        below = max((place for place in asked if f"{path}/".startswith(f"{place}/")), key=len, default=path)
        needed[below] = needed.get(below, 0) + size
    return needed


def _yet_to_write(plan: HostPlan) -> Iterator[tuple[str, int]]:
    for name, entry in plan.checkpoints.items():
        path = plan.checkpoint_paths[name]
        size = expected_bytes(name, entry)
        if size is not None and path not in plan.facts.models:
            yield path, max(0, size - plan.facts.partial.get(path, 0))
    for environment in plan.environments.values():
        if environment.path not in plan.facts.environments:
            yield environment.path, ENVIRONMENT_BYTES[environment.release.accelerator]


def fits(plan: HostPlan) -> tuple[tuple[Fit, ...], dict[str, str]]:
    """The memory account of each configuration, and those without one: name -> checkpoint that is not known.

    A checkpoint that is not on the host yet is known by its catalogue entry's shape.
    """
    memory = min((card.memory_mib for card in plan.decision.cards if card.memory_mib), default=0)
    accounts, unknown = [], {}
    for name, entry in plan.serving.items():
        if not (entry.gpus and memory and entry.memory_fraction):
            continue
        used = [entry.target, *([entry.speculation.drafter] if entry.speculation else [])]
        models = {checkpoint: _model(plan, checkpoint) for checkpoint in used}
        target, *drafter = models.values()
        if missing := [checkpoint for checkpoint, model in models.items() if model is None]:
            unknown[name] = missing[0]
        elif target is not None:
            engine = plan.environments[entry.release].release.engine
            budget = int(entry.memory_fraction * memory * MIB)
            accounts.append(configuration_fit(name, entry, engine, budget, (target, drafter[0] if drafter else None)))
    return tuple(accounts), unknown


def _model(plan: HostPlan, checkpoint: str) -> Model | None:
    entry = plan.checkpoints[checkpoint]
    if (found := plan.facts.models.get(plan.checkpoint_paths[checkpoint])) is not None:
        return Model(found[0], total=found[1])
    size = expected_bytes(checkpoint, entry)
    return Model(entry.shape, total=size) if entry.shape and size else None


def running_configurations(plan: HostPlan) -> list[str]:
    """Configurations whose unit is at work."""
    units = plan.facts.units
    return [name for name in plan.serving if (unit := units.get(layout.unit_name(name))) is not None and unit.active]


def driver_decision(plan: HostPlan) -> DriverStep:
    """What is to be done about the driver."""
    minimum = minimum_driver(env.release for env in plan.environments.values())
    in_use = bool(running_configurations(plan) or plan.facts.processes)
    return driver_step(plan.facts, minimum, upgrade=plan.data.driver_upgrade, in_use=in_use)


def reboot_reasons(plan: HostPlan, step: DriverStep) -> list[str]:
    """Why the host must reboot before it serves; empty when it need not."""
    waiting = [f"{one.key} = {one.value}" for one in reboot_pending(plan.decision.settings, plan.facts)]
    # What a driver that is only now installed needs is known, and marked, once it is there.
    told = step.reboot is not None and step.action is not Action.INSTALL
    return [*([step.reboot] if told and step.reboot else []), *waiting]


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
    if (why or step.reboot) and plan.data.reboot == "yes":
        ports = sorted({entry.listen.port for entry in plan.serving.values()})
        operations.may_reboot(name="Look for running engines", names=list(plan.serving), ports=ports)
        operations.rebooted(name="Reboot", limit_seconds=REBOOT_SECONDS)
        operations.proved(name="Prove the new boot", settings=plan.decision.settings)
    else:
        installing = step.action is Action.INSTALL
        operations.asks_for_reboot(name="Mark what waits for a reboot", why=why, installing=installing)


if __name__ == "builtins":
    host(plan=current_plan())
