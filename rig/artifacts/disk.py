"""The disks of a host under its plan: what lies there, what a deploy adds, what may go. Pure but for reads."""

import shlex
from collections.abc import Iterator

from rig.artifacts.checkpoint_orders import adopted_as_it_is, expected_bytes, order
from rig.artifacts.kernel_orders import kernel_job, kernels, root
from rig.artifacts.units import cache_directory
from rig.facts.host import DataPath
from rig.host.disk import FileSystem, Item, file_systems
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.sources import GeneratorSource

# Unpacked, with pip's copies while it is made (docs/reference/host.md).
ENVIRONMENT_BYTES = {"cuda": 12_000_000_000, "cpu": 3_000_000_000}
KINDS = {
    "checkpoint": ("checkpoint {name}", ""),
    "staging": ("checkpoint whose staging has not ended, and that is not in the plan", "rm -rf {path}"),
    "staged": (
        "checkpoint {name}, which the plan does not use",
        f"{layout.RIGCTL_LINK} checkpoints forget {{name}} && rm -rf {{path}}",
    ),
    "adopted": ("checkpoint {name}, which the plan does not use and the operator brought", ""),
    "current": ("environment", ""),
    "environment": (
        "environment of an earlier deploy, without which no rollback returns to it",
        f"{layout.RIGCTL_LINK} prune --drop {{path}}",
    ),
    "wheels": (
        "cache of wheels, fetched again by the next build",
        f"{layout.HOSTKIT}/current/bin/uv cache clean --cache-dir {{path}}",
    ),
    "work": ("kernel work, compiled again by the next build", "rm -rf {path}"),
    "kernels": ("kernel wheels", ""),
    "tools": ("kernel tools", ""),
    "cache": ("cache of an engine that is not in the plan", "rm -rf {path}"),
    "log": ("log of a configuration that is not in the plan", "rm -rf {path}"),
    "states": ("states for a rollback", ""),
    "benchmark": ("benchmark", ""),
    "training": ("answers, hidden states and checkpoints of a training", ""),
}
"""Kind of `questions` (rig/plan/host_plan.py), or how a recorded checkpoint came -> what it is, what removes it."""


def disk(plan: HostPlan) -> tuple[FileSystem, ...]:
    """The account of each file system; nothing where none was read.

    A path whose file system is not known has one of its own, of size 0.
    """
    if not plan.facts.paths:
        return ()
    there = [(use.place, item) for use, item in zip(plan.facts.disk, _there(plan), strict=True)]
    return file_systems(there, [(_place(plan, item.path), item) for item in _yet_to_write(plan)])


def _there(plan: HostPlan) -> Iterator[Item]:
    needed, names = _needed(plan), {path: name for name, path in plan.checkpoint_paths.items()}
    for use in plan.facts.disk:
        path, (what, command) = use.place.path, KINDS.get(use.kind, ("other", ""))
        if command and (use.used or use.name in needed):
            what, command = f"{what.split()[0]} in use", ""
        words = {"name": shlex.quote(names.get(use.name, use.name)), "path": shlex.quote(path)}
        yield Item(what.format(**words), path, use.bytes, command.format(**words))


def _needed(plan: HostPlan) -> frozenset[str]:
    """Paths that the plan itself needs, of kinds that may go otherwise."""
    stagings = (path.rpartition("/") for path in plan.checkpoint_paths.values())
    return frozenset(
        {env.path for env in plan.built.values()}
        | {f"{parent}/.{name}.partial" for parent, _, name in stagings}
        | {cache_directory(plan, name) for name in plan.serving}
        | {f"{layout.LOGS}/{name}" for name in plan.serving}
    )


def _place(plan: HostPlan, path: str) -> DataPath:
    asked = [one for one in plan.facts.paths if f"{path}/".startswith(f"{one.rstrip('/')}/") and one != "/"]
    below = max(asked, key=len, default=path)
    return plan.facts.paths.get(below) or DataPath(path, False, path, "", path, 0, 0, -1)


def _yet_to_write(plan: HostPlan) -> Iterator[Item]:
    reserves: dict[int, Item] = {}
    for name, entry in plan.checkpoints.items():
        path = plan.checkpoint_paths[name]
        if path in plan.facts.models or adopted_as_it_is(entry) or isinstance(entry.source, GeneratorSource):
            continue
        total = expected_bytes(name, entry)
        yield Item(f"checkpoint {name}", path, total and max(0, total - plan.facts.partial.get(path, 0)))
        reserve = Item("room that a staging leaves", path, order(plan, name).reserve_bytes)
        reserves.setdefault(_place(plan, path).device, reserve)
    yield from reserves.values()
    for environment in plan.built.values():
        if environment.path not in plan.facts.environments:
            yield Item(
                f"environment {environment.name}", environment.path, ENVIRONMENT_BYTES[environment.release.accelerator]
            )
    built = {use.name.rpartition("/")[2] for use in plan.facts.disk if use.kind == "kernels"}
    for name, (_, kernel) in kernels(plan).items():
        if kernel.mode == "source" and kernel.package not in built:
            job = kernel_job(plan, name)
            yield Item(f"kernel build of {job.package}", root(plan), job.minimum_disk_mib << 20)
