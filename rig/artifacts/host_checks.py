"""What a plan needs of its host, and what stands against it: space, memory, driver, reboot. Pure but for manifests."""

from functools import partial

from rig.artifacts.checkpoint_orders import expected_bytes, unpinned
from rig.artifacts.disk import disk
from rig.artifacts.units import engine_environment
from rig.catalog.entries import recorded_fraction
from rig.host.live_settings import reboot_needed, reboot_recommended
from rig.host.memory_fit import MIB, Fit, configuration_fit
from rig.host.model_memory import Model, Unaccounted
from rig.host.nvidia_driver import Action, DriverStep, driver_step, minimum_driver
from rig.host.preflight import Finding, Needs, preflight
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout


def findings(plan: HostPlan) -> list[Finding]:
    """What the preflight says of this host and this plan."""
    running = running_configurations(plan)
    accounts, unknown = fits(plan)
    kernels = [env.release.kernel for env in plan.environments.values() if env.release.kernel]
    brought = {kernel.toolchain.cuda_home for kernel in kernels if kernel.toolchain.packages}
    needs = Needs(
        serving=plan.serving,
        releases={name: env.release for name, env in plan.environments.items()},
        disk=disk(plan),
        fits=accounts,
        not_accounted=unknown,
        # One that a later stage installs is not there yet.
        cuda_home=None if plan.data.cuda_home in brought else plan.data.cuda_home,
        without_nvcc=tuple(
            name
            for name, env in plan.environments.items()
            if env.release.accelerator == "cuda" and not env.carries_nvcc and not (env.cuda_home or env.release.kernel)
        ),
        variables={name: engine_environment(plan, entry) for name, entry in plan.serving.items()},
        own_ports=frozenset(plan.serving[name].listen.port for name in running),
        must_reach=frozenset(plan.data.probes),
        may_reboot=plan.data.reboot == "yes",
        driver_upgrade=plan.data.driver_upgrade,
        accept_known_bad=frozenset(plan.data.accept_known_bad),
        models=_models(plan),
        unproved={
            name: (entry.unproved, [used for used in entry.used if unpinned(plan.checkpoints[used])])
            for name, entry in plan.serving.items()
            if entry.unproved is not None
        },
    )
    return preflight(plan.facts, plan.decision, needs)


def _models(plan: HostPlan) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for entry in plan.serving.values():
        family = plan.checkpoints[entry.target].family
        found.setdefault(entry.release, set()).update(entry.used, [family] if family else [])
    return {release: frozenset(names) for release, names in found.items()}


def fits(plan: HostPlan) -> tuple[tuple[Fit, ...], dict[str, str]]:
    """The memory account of each configuration, and those without one: name -> what is missing.

    A checkpoint that is not on the host yet is known by its catalogue entry's shape. A target whose drafter is not
    known has both: the account without it, and what is missing.
    """
    memory = min((card.memory_mib for card in plan.decision.cards if card.memory_mib), default=0)
    accounts: list[Fit] = []
    unknown: dict[str, str] = {}
    for name, entry in plan.serving.items():
        if not (entry.gpus and memory):
            continue
        fraction = entry.fraction or recorded_fraction(entry.release)
        if not fraction:
            unknown[name] = "its share of a card's memory is not decided: its entry names no memory_fraction"
            continue
        engine = plan.environments[entry.release].release.engine
        account = partial(configuration_fit, name, entry, engine, int(fraction * memory * MIB))
        drafter = entry.drafter
        of = entry.target
        try:
            target = _model(plan, entry.target)
            accounts.append(account((target, None)))
            if drafter and accounts[-1].starts:
                of = drafter
                accounts[-1] = account((target, _model(plan, drafter)))
        except Unaccounted as why:
            unknown[name] = f"{of}: {why}"
    return tuple(accounts), unknown


def _model(plan: HostPlan, checkpoint: str) -> Model:
    """A checkpoint as the host has it, else as its entry describes it. Raises Unaccounted."""
    entry = plan.checkpoints[checkpoint]
    cache = entry.memory.cache if entry.memory else ()
    if (found := plan.facts.models.get(plan.checkpoint_paths[checkpoint])) is not None:
        return Model(found[0], found[1], cache)
    size = expected_bytes(checkpoint, entry)
    if not ((entry.shape or cache) and size):
        lacking = "bytes" if entry.shape or cache else "shape"
        raise Unaccounted(f"no config.json of it was read on the host, and its entry names no `{lacking}`")
    return Model(entry.shape, size, cache)


def running_configurations(plan: HostPlan) -> list[str]:
    units = plan.facts.units
    return [name for name in plan.serving if (unit := units.get(layout.unit_name(name))) is not None and unit.active]


def driver_decision(plan: HostPlan) -> DriverStep:
    minimum = minimum_driver(env.release for env in plan.environments.values())
    in_use = bool(running_configurations(plan) or plan.facts.processes)
    return driver_step(plan.facts, minimum, upgrade=plan.data.driver_upgrade, in_use=in_use)


def reboot_reasons(plan: HostPlan, step: DriverStep) -> list[str]:
    """Why the host must reboot before it serves; empty when it need not."""
    waiting = [f"{one.key} = {one.value}" for one in reboot_needed(plan.decision.settings, plan.facts)]
    # What a driver that is only now installed needs is known, and marked, once it is there.
    known = step.reboot if step.action is not Action.INSTALL else None
    return [known, *waiting] if known else waiting


def reboot_due(plan: HostPlan, step: DriverStep) -> bool:
    """Whether a deploy that may reboot does: for what is only recommended not while an engine of ours runs."""
    later = reboot_recommended(plan.decision.settings, plan.facts) and not running_configurations(plan)
    return bool(reboot_reasons(plan, step) or step.reboot or later)
