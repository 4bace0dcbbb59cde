"""The ledger: one JSON file a result, never changed once written. docs/reference/benchmark.md describes the format."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rig.bench.acceptance_units import DEFINITIONS, Drafting
from rig.catalog.entries import ROOT
from rigctl.contract.order import Part, faults
from rigctl.contract.sweep import Load, Round
from rigctl.errors import RigctlError
from rigctl.whole_files import write_whole

DIRECTORY = ROOT / "ledger"


class LedgerError(RigctlError):
    """A ledger that cannot be read or written. The message names the file and what to do."""


class Drafter(Drafting):
    """How a configuration speculates."""

    name: str
    """Of the checkpoint; of the method where it has none."""
    method: str | None = None
    """None in entries of before it was recorded: the name's where that is a method, else eagle3."""
    targets: list[str] = Field(default_factory=list)
    layer_ids: list[int] | None = None


class ServedAs(Part):
    """The serving configuration a result belongs to, as far as it bears on speed and fairness."""

    name: str
    engine: Literal["vllm", "sglang"]
    version: str | None = None
    """None: not reported."""
    target: str = "kimi-k2.5-int4"
    drafter: Drafter | None = None
    max_running_requests: int | None = None
    """As configured; None: left to the engine."""
    context_length: int | None = None
    details: dict[str, Any] = Field(default_factory=dict)
    """The whole catalogue entry, and the digest the unit was started with."""

    @property
    def effective_limit(self) -> int | None:
        """Running requests the engine allows; None when nobody knows.

        SGLang takes 48 with speculation when nothing is set (server_args, _handle_speculative_decoding).
        """
        if self.max_running_requests is None and self.engine == "sglang" and self.drafter is not None:
            return 48
        return self.max_running_requests


class Workload(Load):
    """What was asked, the same for every configuration that is compared."""

    prompts_sha256: str
    top_p: float = 1.0
    cache: Literal["fresh", "reused"]
    """fresh: every round has prompts of its own, so no prefix is found in the engine's cache."""
    generator: str
    """Load generator with its version."""


class Result(Part):
    """One cell: a configuration under one workload, measured in several rounds, or the reason why it failed."""

    kind: Literal["measured"] = "measured"
    format: Literal[1] = 1
    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-zA-Z0-9._-]*$")]
    at: str
    """UTC, ISO 8601."""
    sweep: str
    host: str
    hardware: str
    configuration: ServedAs
    workload: Workload
    status: Literal["measured", "failed"]
    cause: str | None = None
    warmup_rounds: int = 0
    warmup_stable: bool | None = None
    order: int = 0
    """The cell's number since the engine was started."""
    rounds: list[Round] = Field(default_factory=list)
    receipt: dict[str, Any] = Field(default_factory=dict)
    profile: dict[str, float] = Field(default_factory=dict)
    load_times: dict[str, float] = Field(default_factory=dict)


class Acceptance(Part):
    """A reported acceptance rate, read by one definition (a key of rig.bench.acceptance_units.DEFINITIONS)."""

    rate: float
    definition: str

    def length(self, drafting: Drafting) -> float:
        """The acceptance length this reading means."""
        return DEFINITIONS[self.definition].to_length(self.rate, drafting)


class Figure(Part):
    """A reported number. low and high: a reported range."""

    what: Literal["single_stream_tok_s", "peak_tok_s", "output_tok_s", "ratio_to_base", "prefill_tok_s", "kv_tokens"]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    concurrency: int | None = None
    context: int | None = None

    @property
    def shown(self) -> str:
        if self.value is not None:
            return f"{self.value:,g}"
        return f"{self.low:,g}-{self.high:,g}" if self.low is not None and self.high is not None else ""


class Reference(Part):
    """Numbers other people measured: reported, not measured by us."""

    kind: Literal["reference"]
    format: Literal[1] = 1
    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    reported_by: str
    source: str
    """Where the numbers were read."""
    at: str
    hardware: str
    configuration: ServedAs
    base: str | None = None
    """Id of the reference entry this one is compared with."""
    figures: list[Figure]
    acceptance: list[Acceptance] = Field(default_factory=list)
    """Every reading that is possible, where the report does not say which one it is."""
    note: str = ""

    def figure(self, what: str) -> Figure | None:
        """The first figure of a kind that has one value."""
        return next((figure for figure in self.figures if figure.what == what and figure.value is not None), None)


Entry = Annotated[Result | Reference, Field(discriminator="kind")]
_ENTRY: TypeAdapter[Result | Reference] = TypeAdapter(Entry)


def read(directory: Path = DIRECTORY) -> list[Result | Reference]:
    """Every entry below a directory, by id. Raises LedgerError naming the files that are wrong."""
    entries: dict[str, Result | Reference] = {}
    findings: list[str] = []
    for path in sorted(directory.rglob("*.json")):
        try:
            document = json.loads(path.read_bytes())
            entry = _ENTRY.validate_python(document)
        except ValidationError as error:
            findings += [f"{path}: {fault}" for fault in faults(error, Result, document)]
            continue
        except (ValueError, RecursionError) as error:
            findings.append(f"{path}: not JSON: {error}")
            continue
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror}") from None
        if entry.id in entries:
            findings.append(f"{path}: id {entry.id} is used twice")
        entries[entry.id] = entry
    if findings:
        raise LedgerError("\n".join(findings))
    return [entries[name] for name in sorted(entries)]


def append(result: Result, directory: Path = DIRECTORY) -> Path:
    """Write one result as a new file below <directory>/<host>; the file is whole or not there.

    An entry that is there already is left alone when it says the same. Raises LedgerError when it says otherwise, or
    when the file cannot be written (a full disk): nothing half-written is left.
    """
    path = directory / result.host / f"{result.id}.json"
    content = json.dumps(result.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    if path.exists():
        if path.read_text(encoding="utf-8") == content:
            return path
        raise LedgerError(f"{path} exists and differs: the ledger is append-only")
    temporary = path.with_name(f".new-{os.getpid()}")
    try:
        write_whole(temporary, content)
        os.link(temporary, path)  # fails if somebody was faster; a rename would overwrite
    except OSError as error:
        raise LedgerError(f"{path} cannot be written: {error.strerror}; no result was added") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def results(entries: Iterable[Result | Reference]) -> list[Result]:
    """The measured ones."""
    return [entry for entry in entries if isinstance(entry, Result)]


def references(entries: Iterable[Result | Reference]) -> list[Reference]:
    """The reported ones."""
    return [entry for entry in entries if isinstance(entry, Reference)]
