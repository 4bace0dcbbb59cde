"""The order to validate drafters against their targets before any unit is written (`rigctl checkpoints pairs`)."""

from __future__ import annotations

from typing import ClassVar, Literal

from rigctl.contract.fields import HostPath, Text
from rigctl.contract.order import Order, Part
from rigctl.contract.served_checkpoints import ServedCheckpoints


class DrafterPair(Part):
    """A configuration with a drafter."""

    name: Text
    """Of the configuration."""
    engine: Literal["vllm", "sglang"]
    release: Text
    target_path: HostPath
    drafter_path: HostPath
    """What the unit will read: the drafter as it is published, or its overlay."""
    checkpoint_path: HostPath
    """The drafter as it is published."""
    checkpoints: ServedCheckpoints
    environment: dict[Text, str] = {}
    """Variables of the unit that permit to go beyond a model's limits."""


class DrafterPairs(Order):
    """Every configuration of a host with a drafter."""

    FORMAT: ClassVar[int] = 1

    pairs: list[DrafterPair]
