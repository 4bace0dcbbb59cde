"""The checkpoints that a configuration serves with: in the run specification, and in the order to validate drafters
against their targets before any unit is written (`rigctl checkpoints pairs`)."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rigctl.contract.eagle3_conventions import Convention
from rigctl.contract.fields import HostPath, Text
from rigctl.contract.order import Order, Part
from rigctl.contract.speculation import Method


class Training(Part):
    """What a drafter was trained on, as far as it is known (docs/reference/checkpoints.md, Drafters)."""

    target: Text | None = None
    """Name of the target it was trained for, an entry or not: another one is a warning."""
    convention: Convention = "unknown"
    """What its layer ids mean: the input or the output of the layer, or the ids the engines default to."""
    layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """As the trainer numbers them; unset: those in its config.json."""
    accept_mismatch: bool = False
    """Serve it with other layers than it was trained on, as to repeat an old measurement."""
    notes: dict[str, int | float | str | bool] = {}
    """What notes say of keys of its config.json: a difference is reported, not refused."""

    @model_validator(mode="after")
    def _ids_have_a_meaning(self) -> Self:
        if self.layer_ids and self.convention in ("unknown", "engine-default"):
            raise ValueError("layer_ids need a convention: input or output")
        return self


class Provenance(Part):
    """How a drafter was made. Reported, never validated."""

    engine: Text | None = None
    """The engine that extracted the hidden states, and its version."""
    version: Text | None = None
    dtype: Text | None = None
    backend: Text | None = None
    samples: Annotated[int, Field(ge=1)] | None = None
    epochs: Annotated[int, Field(ge=1)] | None = None
    epoch: Annotated[int, Field(ge=0)] | None = None
    """Index of the epoch that was kept, counted from 0."""
    start: Text | None = None
    """What it was trained from."""


class ServedCheckpoints(Part):
    """The checkpoints of one configuration, by their names in the catalogue, and what they are used for."""

    target: Text
    drafter: Text | None
    """The checkpoint whose files it is: a drafter of a benchmark's variant names the one it is derived from."""
    version: Text
    """Of the engine."""
    context: Annotated[int, Field(ge=1)] | None
    """Tokens of prompt and answer together; the target's own limit when unset."""
    trust_remote_code: bool
    training: Training | None
    """Of the drafter."""


class DrafterPair(Part):
    """A configuration whose speculation its checkpoints must fit: a drafter and its target, or a target's own head."""

    name: Text
    """Of the configuration."""
    method: Method = "eagle3"
    steps: Annotated[int, Field(ge=1)] | None = None
    """Drafted tokens a step."""
    engine: Literal["vllm", "sglang"]
    release: Text
    environment_path: HostPath | None = None
    """The engine's environment, whose registry says which architectures it knows; unset: none is refused."""
    target_path: HostPath
    drafter_path: HostPath | None
    """What the unit will read: the drafter as it is published, or its overlay; null for a method without one."""
    checkpoint_path: HostPath | None
    """The drafter as it is published."""
    checkpoints: ServedCheckpoints
    environment: dict[Text, str] = {}
    """Variables of the unit that permit to go beyond a model's limits."""


class DrafterPairs(Order):
    """Every configuration of a host whose speculation its checkpoints must fit."""

    FORMAT: ClassVar[int] = 1

    pairs: list[DrafterPair]
