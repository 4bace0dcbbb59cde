"""The run specification: what `rigctl serve` needs besides the engine's argv, environment and sandbox in the unit.

It lies in /etc/kimi-rig/configurations/<name>.json, one for each serving configuration.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rigctl.contract import layout
from rigctl.contract.answering import Answer, Parameters, Sampling
from rigctl.contract.fields import ListenAddress, Text
from rigctl.contract.limits import Limits
from rigctl.contract.order import Document, Order, Part, extended
from rigctl.contract.served_checkpoints import ServedCheckpoints
from rigctl.contract.speculation import EXTRACTS, Method, Speculation

Names = dict[str, str]


class Endpoint(Part):
    """An address that the engine listens on."""

    host: ListenAddress
    port: Annotated[int, Field(ge=1, le=65535)]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def reached_at(self) -> str:
        """Address by which this machine reaches it, also when it listens on every one."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # read, not bound
        return everywhere.get(self.host, self.host)

    @property
    def url(self) -> str:
        """Where this machine sends its requests."""
        host = self.reached_at
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class LiveSettings(Part):
    """What must be live on the host before an engine starts; one that runs need not restart for it."""

    kernel_arguments: list[str]
    module_options: dict[str, Names]
    sysctls: Names
    governor: str | None
    disk_scheduler: Names
    power_limit_w: int | None


PREVIOUS_FORMAT = 2
"""Of the specifications that version 0.3.0 (66d813d) wrote."""
NEWER: Mapping[str, Any] = {}
"""Keys that version 0.3.0 did not write, as "limits.settle_seconds": the value of each that says what 0.3.0 did.

A specification of 0.3.0 is read with these, and while a key has its value here, units that 0.3.0 started are current.
"""


def _with_newer_keys(old: Document) -> Document:
    """A document of this version of one of 0.3.0."""
    for path, value in NEWER.items():
        old = _with(old, path, value)
    return old


def _with(part: Any, path: str, value: Any) -> Any:
    """A copy of a part with one more key at a path: in each part of a list, in none where there is null."""
    if isinstance(part, list):
        return [_with(one, path, value) for one in part]
    key, _, below = path.partition(".")
    if part is None or not below:
        return part and extended(part, **{key: value})
    return {**part, key: _with(part[key], below, value)}


class RunSpecification(Order):
    """One configuration as deployed."""

    FORMAT: ClassVar[int] = PREVIOUS_FORMAT + bool(NEWER)
    upgrades = {PREVIOUS_FORMAT: _with_newer_keys}
    WRITTEN_WHOLE: ClassVar[bool] = True

    name: Text
    description: str
    family: str | None
    """Model family, where the catalogue names one."""
    engine: Literal["vllm", "sglang"]
    release: Text
    endpoints: Annotated[list[Endpoint], Field(min_length=1)]
    model: Text
    """Name that clients use."""
    answer: Answer
    quiet: Parameters
    """Parameters that keep a question short for a model that thinks: the watchdog's."""
    sampling: Sampling
    """Of `rigctl chat`."""
    tool_call_parser: str | None
    reasoning_parser: str | None
    api_key: bool
    gpus: list[Annotated[int, Field(ge=0)]]
    target_path: Text
    drafter_path: Text | None
    environment_path: Text
    series: Text | None
    """Directory of the release's patches."""
    speculation: Speculation | None
    checkpoints: ServedCheckpoints
    harmless_log: list[str]
    drain: Literal["none", "signal", "flag"]
    rate_counts_bonus: bool
    limits: Limits
    host_settings: LiveSettings
    unit_digest: str
    """sha256 of the unit file."""
    digest: Text
    """Another one: a restart would change what runs (rig/artifacts/units.py)."""
    same_as: list[Text]
    """Digests that the version before gave to the very same, where it is another."""

    @model_validator(mode="after")
    def _drafter_has_a_name(self) -> Self:
        if self.drafter_path is not None and self.checkpoints.drafter is None:
            raise ValueError("drafter_path needs checkpoints.drafter")
        return self

    @property
    def unit(self) -> str:
        return layout.unit_name(self.name)

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def base_url(self) -> str:
        return self.endpoint.url

    @property
    def method(self) -> Method | None:
        """How it speculates; None where it does not."""
        return self.speculation.method if self.speculation else None

    @property
    def steps(self) -> int | None:
        """Drafted tokens a step."""
        return self.speculation.steps if self.speculation else None

    @property
    def acceptance_floor(self) -> float:
        """Acceptance length below which speculation costs more than it brings: measured here, or the host's default."""
        if self.method == EXTRACTS:
            return 1.0
        known = self.speculation.break_even_length if self.speculation else None
        return known or self.limits.acceptance_floor

    @property
    def known_as(self) -> list[str]:
        """Every digest of this very specification: a service that was started with one of them is current."""
        return [self.digest, *self.same_as]
