"""Sweeps (inventory/benchmark.yaml) as typed data, and what a host is asked to do. Pure but for reading files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rig.artifacts.units import run_specification
from rig.catalog.entries import INVENTORY, NAME, ROOT, Configuration, Entry
from rig.catalog.yaml_source import CatalogError, load
from rig.plan.host_plan import HostPlan, canonical_digest
from rigctl.contract import layout

FILE = "benchmark.yaml"
PROMPTS = ROOT / "files" / "bench" / "prompts"
LOCK = ROOT / "files" / "bench" / "requirements.txt"
STATE = f"{layout.STATE}/bench"
SYNTHETIC = "synthetic"


class Warmup(Entry):
    """Rounds before the measured ones: at least, at most; stable when two in a row differ by less than tolerance."""

    least: Annotated[int, Field(ge=1)] = 2
    most: Annotated[int, Field(ge=1)] = 5
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.05


class LoadAxis(Entry):
    """One context with its concurrencies."""

    context: Annotated[int, Field(ge=0)]
    """Tokens of filler in front of each prompt."""
    concurrency: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1)]


class Sweep(Entry):
    """One sweep: the loads, and how each is measured."""

    description: str = ""
    prompts: str = "mixed"
    """A file of files/bench/prompts/, or synthetic."""
    loads: Annotated[list[LoadAxis], Field(min_length=1)]
    rounds: Annotated[int, Field(ge=1)] = 3
    requests_per_stream: Annotated[int, Field(ge=1)] = 4
    least_requests: Annotated[int, Field(ge=1)] = 8
    output_tokens: Annotated[int, Field(ge=2)] = 512
    ignore_eos: bool = False
    """True makes every answer as long as output_tokens allows."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 20260214
    warmup: Warmup = Warmup()
    request_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Limit of one request."""
    profile: bool = False
    """Ask the engine's profiler for the share of AllReduce in decoding, where it and the GPUs allow."""
    variants: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,59}$")], dict[str, Any]] = Field(
        default_factory=dict
    )
    """Name -> keys of serving.yaml that differ, or layer_shift; each makes a configuration of its own."""


@dataclass(frozen=True)
class Workload:
    """One load with everything a host needs to make it."""

    id: str
    prompts: str
    context: int
    concurrency: int
    requests: int
    output_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    seed: int


def load_sweeps(inventory: Path = INVENTORY) -> dict[str, Sweep]:
    """Read and check inventory/benchmark.yaml. Raises CatalogError listing every finding with file and line."""
    document = load(inventory / FILE, shown_as=f"{inventory.name}/{FILE}")
    sweeps: dict[str, Sweep] = {}
    findings: list[str] = []
    for name, value in document.data.items():
        if not NAME.fullmatch(name):
            findings.append(
                f"{document.place((name,))}: {name}: a name is lower-case letters, digits, '.', '_' and '-'"
            )
            continue
        try:
            sweeps[name] = Sweep.model_validate(value)
        except ValidationError as error:
            findings += [
                f"{document.place((name, *problem['loc']))}: {'.'.join(map(str, (name, *problem['loc'])))}: "
                f"{problem['msg']}"
                for problem in error.errors(include_url=False)
            ]
            continue
        if sweeps[name].prompts != SYNTHETIC and not (PROMPTS / f"{sweeps[name].prompts}.json").is_file():
            at = document.place((name, "prompts"))
            findings.append(f"{at}: {name}.prompts: there is no files/bench/prompts/{sweeps[name].prompts}.json")
    if findings:
        raise CatalogError("\n".join(findings))
    return sweeps


def find_sweep(name: str, inventory: Path = INVENTORY) -> Sweep:
    """One sweep. Raises CatalogError when there is none of this name."""
    sweeps = load_sweeps(inventory)
    if name not in sweeps:
        raise CatalogError(f"there is no sweep {name} in inventory/{FILE} (there are: {', '.join(sweeps)})")
    return sweeps[name]


def workloads_of(sweep: Sweep) -> list[Workload]:
    """Every load, in the order it is measured: short contexts first, then by concurrency."""
    return [
        Workload(
            id=f"{sweep.prompts}-t{sweep.temperature:g}-c{axis.context}-n{concurrency}",
            prompts=sweep.prompts,
            context=axis.context,
            concurrency=concurrency,
            requests=max(sweep.least_requests, sweep.requests_per_stream * concurrency),
            output_tokens=sweep.output_tokens,
            ignore_eos=sweep.ignore_eos,
            temperature=sweep.temperature,
            top_p=sweep.top_p,
            seed=sweep.seed,
        )
        for axis in sorted(sweep.loads, key=lambda axis: axis.context)
        for concurrency in sorted(axis.concurrency)
    ]


def fits(configuration: Configuration, workload: Workload) -> bool:
    """True when prompt filler and answer fit into the configuration's context."""
    limit = configuration.context_length
    return limit is None or workload.context + workload.output_tokens < limit


def prompt_texts(name: str) -> list[str]:
    """The texts of a prompt set; the synthetic one is made on the host."""
    if name == SYNTHETIC:
        return []
    texts: list[str] = json.loads((PROMPTS / f"{name}.json").read_text(encoding="utf-8"))["prompts"]
    return texts


def prompts_digest(name: str) -> str:
    """sha256 of a prompt set: with the seed it decides every request."""
    return hashlib.sha256(json.dumps([name, prompt_texts(name)]).encode()).hexdigest()


def generator_path(ml_env: str) -> str:
    """Where the load generator's environment lies on a host: named by its lock."""
    return f"{ml_env}/aiperf/{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"


@dataclass(frozen=True)
class HostSweep:
    """What one host is asked to do. document: the JSON that `rigctl bench` reads."""

    id: str
    name: str
    document: Mapping[str, Any]
    skipped: Sequence[str]
    """Cells that do not fit into a configuration's context, in words."""

    @property
    def directory(self) -> str:
        return f"{STATE}/{self.id}"

    @property
    def cells(self) -> list[tuple[str, str]]:
        return [(name, workload) for name, workloads in self.document["cells"].items() for workload in workloads]


def host_sweep(plan: HostPlan, name: str, sweep: Sweep, configurations: Sequence[str]) -> HostSweep:
    """The sweep of one host. Its id covers everything that bears on a result, so a finished cell is found again.

    Raises CatalogError when nothing is left to measure.
    """
    workloads = workloads_of(sweep)
    cells = {c: [w.id for w in workloads if fits(plan.serving[c], w)] for c in configurations}
    skipped = [f"{c}, {w.id}" for c in configurations for w in workloads if w.id not in cells[c]]
    if not any(cells.values()):
        raise CatalogError(f"sweep {name}: no load fits into the context of {', '.join(configurations)}")
    document = {
        "generator": f"{generator_path(plan.data.ml_env)}/bin/aiperf",
        "settings": {
            "rounds": sweep.rounds,
            "warmup_least": sweep.warmup.least,
            "warmup_most": sweep.warmup.most,
            "tolerance": sweep.warmup.tolerance,
            "request_seconds": sweep.request_seconds,
            "profile": sweep.profile,
        },
        "workloads": [vars(workload) for workload in workloads],
        "cells": cells,
        "prompts": {sweep.prompts: prompt_texts(sweep.prompts)} if sweep.prompts != SYNTHETIC else {},
    }
    started_as = {c: run_specification(plan, c).digest for c in configurations}
    identity = canonical_digest({"document": document, "started_as": started_as})[:12]
    return HostSweep(f"{name}-{identity}", name, {"id": f"{name}-{identity}", **document}, skipped)
