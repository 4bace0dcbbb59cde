"""Configurations derived from one entry for a sweep: other steps, limits, flags, or layer ids of the drafter. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rig.bench.sweeps import SweepEntry
from rig.catalog.entries import Checkpoint, Configuration
from rig.catalog.yaml_source import CatalogError, Document
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.order import faults

LAYER_SHIFT = "layer_shift"
PROFILED = "profiled"


@dataclass(frozen=True)
class ShiftedDrafter:
    """A drafter whose layer ids are shifted: an overlay of the original."""

    name: str
    source: str
    path: str
    target: str
    shift: int


@dataclass(frozen=True)
class Derived:
    """A host's plan with the configurations that a sweep measures. made: those that exist for the sweep only."""

    plan: HostPlan
    names: Sequence[str]
    made: Sequence[str]
    drafters: Sequence[ShiftedDrafter]


def derive(plan: HostPlan, sweep: SweepEntry, configurations: Sequence[str]) -> Derived:
    """Apply a sweep's variants to each configuration; without variants the configurations themselves.

    Raises CatalogError for an unknown configuration, and for a variant that serving.yaml would not accept.
    """
    unknown = [name for name in configurations if name not in plan.serving]
    if unknown or not configurations:
        there = ", ".join(plan.serving)
        raise CatalogError(
            f"this host has no configuration {', '.join(unknown) or '(none was named)'} (it has: {there})"
        )
    variants: Mapping[str, Mapping[str, Any]] = sweep.variants or ({PROFILED: {}} if sweep.profile else {})
    if not variants:
        return Derived(plan, list(configurations), [], [])
    serving, drafters = dict(plan.serving), list[ShiftedDrafter]()
    for base, (variant, change) in itertools.product(configurations, variants.items()):
        name = f"{base}.{variant}"
        changes = [{key: value for key, value in change.items() if key != LAYER_SHIFT}]
        if sweep.profile:
            changes.append(profiler(plan, base, name))
        if LAYER_SHIFT in change:
            drafters.append(_shifted(plan, base, variant, change[LAYER_SHIFT]))
            changes.append({"speculation": {"drafter": drafters[-1].name}})
        serving[name] = _changed(plan.serving[base], changes, name)
    originals = {drafter.name: plan.checkpoints[drafter.source] for drafter in drafters}
    derived = replace(
        plan,
        serving=serving,
        checkpoint_paths={**plan.checkpoint_paths, **{drafter.name: drafter.path for drafter in drafters}},
        checkpoints={**plan.checkpoints, **{name: _layers_as_they_stand(one) for name, one in originals.items()}},
        derived_from={drafter.name: drafter.source for drafter in drafters},
    )
    made = [f"{base}.{variant}" for base in configurations for variant in variants]
    for name in made:
        drafter, drafts = serving[name].drafter, serving[name].speculation
        if drafts is not None and drafts.method == "mtp" and plan.checkpoints[serving[name].target].heads.mtp is None:
            raise CatalogError(
                f"variant {name}: {serving[name].target} names no head of its own (`heads`) to draft with"
            )
        if drafter is not None and drafter not in derived.checkpoint_paths:
            raise CatalogError(
                f"variant {name}: drafter {drafter} is not on this host; deploy a configuration that uses it first"
            )
    return Derived(derived, made, made, drafters)


def profiler(plan: HostPlan, base: str, name: str) -> dict[str, Any]:
    """What makes an engine write traces below its unit's cache directory when its profiler is started."""
    directory = f"{layout.CACHE}/{name}/profile"
    if plan.environments[plan.serving[base].release].release.engine == "sglang":
        return {"environment": {"SGLANG_TORCH_PROFILER_DIR": directory}}
    # Stacks make a trace of hundreds of steps too large to read; the frontend launches no kernels.
    settings = {
        "profiler": "torch",
        "torch_profiler_dir": directory,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return {"flags": {"profiler-config": settings}}


def _changed(configuration: Configuration, changes: Sequence[Mapping[str, Any]], name: str) -> Configuration:
    document = Document(configuration.model_dump())
    for change in ({"description": f"{configuration.description} ({name})"}, *changes):
        document = document.merged(Document(dict(change)))
    try:
        return Configuration.model_validate(document.data)
    except ValidationError as error:
        raise CatalogError(
            "; ".join(f"variant {name}: {fault}" for fault in faults(error, Configuration, document.data))
        ) from None


def _layers_as_they_stand(entry: Checkpoint) -> Checkpoint:
    """The entry without what it says of layer ids: the sweep asks which are right."""
    training = entry.training.model_copy(update={"convention": "unknown", "layer_ids": None})
    return entry.model_copy(update={"training": training})


def _shifted(plan: HostPlan, base: str, variant: str, shift: Any) -> ShiftedDrafter:
    if type(shift) is not int:
        raise CatalogError(f"variant {base}.{variant}: {LAYER_SHIFT} is a whole number (got {shift!r})")
    configuration = plan.serving[base]
    source = configuration.drafter
    if source is None:
        raise CatalogError(f"variant {variant} shifts a drafter's layer ids, {base} has no drafter")
    name = f"{source}.{variant}"
    path = f"{plan.data.drafters}/.bench/{name}"
    return ShiftedDrafter(name, source, path, plan.checkpoint_paths[configuration.target], shift)
