"""A sweep: what a host is to measure (Sweep), what it measured (CellResult), and what that host is (HostFacts).

The catalogue (inventory/benchmark.yaml) and the ledger use the same parts, so a key has one name and one rule.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rigctl.contract.fields import Positive
from rigctl.contract.order import Order, Part

SYNTHETIC = "synthetic"
"""The prompt set that is made on the host."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-zA-Z0-9._-]*$")]
"""What becomes a part of a file's name."""
Context = Annotated[int, Field(ge=0)]
OutputTokens = Annotated[int, Field(ge=2)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]


class Load(Part):
    """One load, the same for every configuration that is compared."""

    prompts: str
    """A file of files/bench/prompts/, or synthetic."""
    context: Context
    """Tokens of filler in front of each prompt; 0 is none."""
    concurrency: Positive
    requests: Positive
    """A round's number of requests."""
    output_tokens: OutputTokens
    """Most tokens an answer may have."""
    ignore_eos: bool
    """True makes every answer as long as output_tokens allows."""
    temperature: Temperature
    top_p: TopP
    seed: int


class Workload(Load):
    """A load with the name it has in a sweep."""

    id: Name


class Warmup(Part):
    """Rounds before the measured ones: at least, at most; stable when two in a row differ by less than tolerance."""

    least: Positive = 2
    most: Positive = 5
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.05


class Measuring(Part):
    """How every cell is measured."""

    rounds: Positive = 3
    warmup: Warmup = Warmup()
    request_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    """Limit of one request."""
    profile: bool = False
    """Ask the engine's profiler for the share of AllReduce in decoding, where it and the GPUs allow."""
    load_time: bool = False
    """Before its first cell, start each configuration with its files cold and warm in the page cache."""


class Sweep(Order, Measuring):
    """Every configuration under every workload that is listed for it."""

    id: Name
    generator: str
    """Path of the load generator."""
    workloads: list[Workload]
    cells: dict[Name, list[Name]]
    """Configuration -> ids of its workloads, in order."""
    prompts: dict[str, list[str]]
    """The texts of each prompt set that is used, but for the synthetic one."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """An order says everything (defaults are the catalogue's), and names only workloads and prompts that it has."""
        unsaid = Measuring.model_fields.keys() - self.model_fields_set
        unsaid |= {f"warmup.{key}" for key in Warmup.model_fields.keys() - self.warmup.model_fields_set}
        known = [workload.id for workload in self.workloads]
        unknown = {workload for _, workload in self.pairs}.difference(known)
        sets = {workload.prompts for workload in self.workloads} - {SYNTHETIC}
        for wrong, what in (
            (unsaid, "is missing"),
            ({name for name in known if known.count(name) > 1}, "names two workloads"),
            (unknown, "is listed in cells and is no workload"),
            ({name for name in sets if not self.prompts.get(name)}, "has no prompts"),
        ):
            if wrong:
                raise ValueError(f"{', '.join(sorted(wrong))} {what}")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Configuration and workload of every cell."""
        return [(name, workload) for name, workloads in self.cells.items() for workload in workloads]


def cell_file(configuration: str, workload: str) -> str:
    """Where a finished cell lies, below the directory of its sweep."""
    return f"cells/{configuration}+{workload}.json"


class Distribution(Part):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Counters(Part):
    """What the engine counted over exactly the measured window."""

    generated_tokens: int | None = None
    prompt_tokens: int | None = None
    preemptions: int | None = None
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_at: list[int] = Field(default_factory=list)
    own_rate: float | None = None
    """The engine's own rate at the end of the window; its definition depends on the release."""

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens a step yields, 1 + accepted drafts a step. None before the first step."""
        return 1 + self.accepted / self.drafts if self.drafts and self.accepted is not None else None

    @property
    def positions(self) -> list[float]:
        """Share of the steps in which the token at each position was accepted; falls from left to right."""
        return [accepted / self.drafts for accepted in self.accepted_at] if self.drafts else []


class Gpu(Part):
    """One GPU during the window: means."""

    name: str
    power_w: float
    clock_mhz: float
    memory_mib: float


class Observed(Part):
    """Gauges sampled during the window."""

    samples: int = 0
    running_max: float | None = None
    running_mean: float | None = None
    waiting_max: float | None = None
    waiting_mean: float | None = None
    kv_use_max: float | None = None
    """Share of the KV cache, 0 to 1."""
    own_length_mean: float | None = None
    """SGLang's gauge of the acceptance length, where its release counts no verifications."""
    gpus: list[Gpu] = Field(default_factory=list)


class Round(Part):
    """One measured window. seconds: from the first request to the last answer."""

    seconds: float
    requests: int
    errors: int
    prompt_tokens: int
    output_tokens: int
    """Tokens the server said it made, summed over the answers."""
    output_tok_s: float
    stream_tok_s: float
    """Median over the requests: output tokens after the first / time after the first token."""
    ttft_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    counters: Counters = Counters()
    observed: Observed = Observed()
    error_summary: list[str] = Field(default_factory=list)

    def impossible(self) -> list[str]:
        """Values that no measurement has; a result that holds one says nothing."""
        found = [f"{key} is {value}" for key, value in _numbers(self.model_dump()) if not 0 <= value < math.inf]
        found += [f"{key} is 0" for key in ("seconds", "requests", "output_tokens") if getattr(self, key) == 0]
        if self.counters.generated_tokens is None:
            found.append("counters.generated_tokens is missing: the answers cannot be compared with the engine's count")
        drafts, drafted, accepted = self.counters.drafts or 0, self.counters.drafted or 0, self.counters.accepted or 0
        if accepted > drafted or any(count > drafts for count in self.counters.accepted_at):
            found.append(f"counters.accepted: more than was drafted ({accepted} of {drafted})")
        return found


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a document with its path."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float):
        yield path, value


class CellResult(Order):
    """One cell as the host measured it, or the reason why it failed."""

    configuration: Name
    workload: Name
    digest: str
    """What the unit was started with."""
    at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    status: Literal["measured", "failed"]
    cause: str | None = None
    order: int = 0
    """The cell's number since the engine was started."""
    warmup_rounds: int = 0
    warmup_stable: bool | None = None
    """None: one round was asked for."""
    generator: str | None
    """The load generator with its version."""
    rounds: list[Round]
    profile: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    load_times: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """How its configuration started (rigctl/bench/load_time.py)."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        measured = self.status == "measured"
        if measured != bool(self.rounds) or measured != bool(self.generator) or measured == bool(self.cause):
            raise ValueError("a measured cell has rounds and a generator, a failed one has a cause")
        if found := [f"rounds.{number}.{text}" for number, one in enumerate(self.rounds) for text in one.impossible()]:
            raise ValueError("; ".join(found))
        return self


class ModelFacts(Part):
    """What a model directory's config.json says of layers; layer_ids: those a drafter reads."""

    layers: int | None = None
    layer_ids: list[int] | None = None


class HostFacts(Order):
    """What a result needs to know of its host."""

    hardware: str
    driver: str | None
    kernel: str
    receipt: dict[str, Any]
    models: dict[str, ModelFacts]
    """By directory."""
