"""Sweeps (inventory/benchmark.yaml) as typed data, and the order to a host. Pure but for reading files."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rig.artifacts.units import run_specification
from rig.catalog.entries import LONGEST_NAME, NAME, ROOT, inventory_directory
from rig.catalog.yaml_source import CatalogError, load
from rig.plan.host_plan import HostPlan, canonical_digest
from rigctl.contract import layout
from rigctl.contract.order import Part, keys, words
from rigctl.contract.sweep import (
    SYNTHETIC,
    Context,
    Measuring,
    OutputTokens,
    Positive,
    Sweep,
    Temperature,
    TopP,
    Workload,
)

FILE = "benchmark.yaml"
PROMPTS = ROOT / "files" / "bench" / "prompts"
LOCK = ROOT / "files" / "bench" / "requirements.txt"
STATE = f"{layout.STATE}/bench"


class LoadAxis(Part):
    """One context with its concurrencies."""

    context: Context
    """Tokens of filler in front of each prompt."""
    concurrency: Annotated[list[Annotated[Positive, Field(le=4096)]], Field(min_length=1)]


class SweepEntry(Measuring):
    """One sweep of the catalogue: the loads, and how each is measured."""

    description: str = ""
    prompts: str = "mixed"
    """A file of files/bench/prompts/, or synthetic."""
    loads: Annotated[list[LoadAxis], Field(min_length=1)]
    requests_per_stream: Positive = 4
    least_requests: Positive = 8
    output_tokens: OutputTokens = 512
    ignore_eos: bool = False
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: int = 20260214
    variants: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,59}$")], dict[str, Any]] = Field(
        default_factory=dict
    )
    """Name -> keys of serving.yaml that differ, or layer_shift; each makes a configuration of its own."""


def load_sweeps(inventory: Path | None = None) -> dict[str, SweepEntry]:
    """Read and check inventory/benchmark.yaml. Raises CatalogError listing every finding with file and line."""
    directory = inventory or inventory_directory()
    document = load(directory / FILE, shown_as=f"{directory.name}/{FILE}")
    sweeps: dict[str, SweepEntry] = {}
    findings: list[str] = []
    for name, value in document.data.items():
        if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            findings.append(
                f"{document.place((name,))}: {name[:60]}: a name is at most {LONGEST_NAME} lower-case letters, digits, "
                "'.', '_' and '-'"
            )
            continue
        try:
            sweeps[name] = SweepEntry.model_validate(value)
        except ValidationError as error:
            findings += [
                f"{document.place((name, *problem['loc']))}: {'.'.join(map(str, (name, *problem['loc'])))}: "
                f"{words(problem, keys(SweepEntry))}"
                for problem in error.errors(include_url=False)
            ]
            continue
        if sweeps[name].prompts != SYNTHETIC and not (PROMPTS / f"{sweeps[name].prompts}.json").is_file():
            at = document.place((name, "prompts"))
            findings.append(f"{at}: {name}.prompts: there is no files/bench/prompts/{sweeps[name].prompts}.json")
    if findings:
        raise CatalogError("\n".join(findings))
    return sweeps


def find_sweep(name: str, inventory: Path | None = None) -> SweepEntry:
    """One sweep. Raises CatalogError when there is none of this name."""
    sweeps = load_sweeps(inventory)
    if name not in sweeps:
        raise CatalogError(f"there is no sweep {name} in inventory/{FILE} (there are: {', '.join(sweeps)})")
    return sweeps[name]


def workloads_of(sweep: SweepEntry) -> list[Workload]:
    """Every load, in the order it is measured: short contexts first, then by concurrency."""
    same = ("prompts", "output_tokens", "ignore_eos", "temperature", "top_p", "seed")
    return [
        Workload(
            id=f"{sweep.prompts}-t{sweep.temperature:g}-c{axis.context}-n{concurrency}",
            context=axis.context,
            concurrency=concurrency,
            requests=max(sweep.least_requests, sweep.requests_per_stream * concurrency),
            **{key: getattr(sweep, key) for key in same},
        )
        for axis in sorted(sweep.loads, key=lambda axis: axis.context)
        for concurrency in sorted(axis.concurrency)
    ]


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
    """What one host is asked to do. name: of the catalogue's sweep."""

    name: str
    order: Sweep
    skipped: Sequence[str]
    """Cells that do not fit into a configuration's context, in words."""

    @property
    def directory(self) -> str:
        return f"{STATE}/{self.order.id}"


def host_sweep(plan: HostPlan, name: str, sweep: SweepEntry, configurations: Sequence[str]) -> HostSweep:
    """The sweep of one host. Its id covers everything that bears on a result, so a finished cell is found again.

    Raises CatalogError when nothing is left to measure.
    """
    workloads = workloads_of(sweep)
    # Filler and answer must fit into a configuration's context, where it has a limit.
    room = {c: plan.serving[c].context_length or math.inf for c in configurations}
    cells = {c: [w.id for w in workloads if w.context + w.output_tokens < room[c]] for c in configurations}
    skipped = [f"{c}, {w.id}" for c in configurations for w in workloads if w.id not in cells[c]]
    if not any(cells.values()):
        raise CatalogError(f"sweep {name}: no load fits into the context of {', '.join(configurations)}")
    content = {
        **sweep.model_dump(include=set(Measuring.model_fields)),
        "format": Sweep.FORMAT,
        "generator": f"{generator_path(plan.data.ml_env)}/bin/aiperf",
        "workloads": [workload.model_dump() for workload in workloads],
        "cells": cells,
        "prompts": {sweep.prompts: prompt_texts(sweep.prompts)} if sweep.prompts != SYNTHETIC else {},
    }
    started_as = {c: run_specification(plan, c).digest for c in configurations}
    identity = canonical_digest({"document": content, "started_as": started_as})[:12]
    return HostSweep(name, Sweep.parse({**content, "id": f"{name}-{identity}"}, f"sweep {name}"), skipped)
