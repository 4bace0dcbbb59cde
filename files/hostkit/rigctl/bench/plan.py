"""What a sweep is to do, as benchmark.py wrote it down: typed, and the same for every configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError


@dataclass(frozen=True)
class Workload:
    """One load. context: tokens of filler before each prompt. requests: of one round."""

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


@dataclass(frozen=True)
class Settings:
    """How every cell is measured. Warm-up ends when two rounds in a row differ by less than `tolerance`."""

    rounds: int
    warmup_least: int
    warmup_most: int
    tolerance: float
    request_seconds: float
    profile: bool


@dataclass(frozen=True)
class Plan:
    """A sweep: every configuration under every workload that is listed for it."""

    id: str
    directory: Path
    generator: str
    """Path of the load generator."""
    settings: Settings
    workloads: dict[str, Workload]
    cells: dict[str, list[str]]
    """Configuration -> ids of its workloads, in order."""
    prompts: dict[str, list[str]]

    def result_path(self, configuration: str, workload: str) -> Path:
        return self.directory / "cells" / f"{configuration}+{workload}.json"

    @property
    def size(self) -> int:
        return sum(len(workloads) for workloads in self.cells.values())


def _typed(kind: type[Any], data: dict[str, Any]) -> Any:
    return kind(**{field.name: data[field.name] for field in fields(kind)})


def read_plan(path: Path) -> Plan:
    """Read a sweep. Raises RigctlError when it is absent or not of this version of rigctl."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Plan(
            id=data["id"],
            directory=path.parent,
            generator=data["generator"],
            settings=_typed(Settings, data["settings"]),
            workloads={entry["id"]: _typed(Workload, entry) for entry in data["workloads"]},
            cells=data["cells"],
            prompts=data["prompts"],
        )
    except OSError as error:
        raise RigctlError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RigctlError(f"{path} is no sweep ({error!r}); run benchmark.py again") from None
