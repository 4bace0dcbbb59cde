"""What a training takes, said before anything is started: rows, tokens, bytes, hours; and what does not fit. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rigctl.contract.training_job import TrainingJob

RESERVE = 0.05
"""Share of a file system that stays free."""


@dataclass(frozen=True)
class Forecast:
    """Of the largest rung. rows, tokens: to be trained on. parts: in which states are extracted, one after another.

    hours: of extraction alone. free: bytes on the file system. measured: whether rate and tokens a row are this host's.
    """

    rows: int
    tokens: int
    bytes: int
    parts: int
    rate: float
    hours: float
    free: int
    measured: bool
    refused: tuple[str, ...]

    def lines(self, job: TrainingJob) -> Iterator[str]:
        of = "measured here" if self.measured else "expected"
        yield f"{self.rows:,} conversations, {self.tokens:,} tokens ({of})"
        yield f"a token: {job.bytes_a_token:,} bytes of states"
        yield f"states: {self.bytes / 1e9:,.2f} GB, at most {job.states.disk_limit / 1e9:,.2f} GB at once"
        if self.parts > 1:
            yield f"extraction and training take turns in {self.parts} parts: each part is seen in one go"
        yield f"extraction: {self.hours:,.2f} h at {self.rate:,.0f} tok/s ({of})"
        yield f"free on {job.root}: {self.free / 1e9:,.2f} GB"
        yield from (f"REFUSED: {one}" for one in self.refused)


@dataclass(frozen=True)
class Measured:
    """On this host, by steps that are done: tokens a row, tokens a second of extraction, bytes that its states take."""

    a_row: float | None = None
    rate: float | None = None
    there: int = 0


def forecast(job: TrainingJob, have: int, free: int, measured: Measured) -> Forecast:
    """have: conversations in all prompts. free: bytes on the file system."""
    a_row, rate, there = measured.a_row, measured.rate, measured.there
    usable = int(have * (1 - job.held_out))
    wanted = job.ladder[-1]
    rows = min(wanted, usable)
    tokens = math.ceil(rows * (a_row or job.tokens_a_row))
    size = tokens * job.bytes_a_token
    parts = max(1, min(rows, math.ceil(size / job.states.disk_limit)))
    refused = []
    if wanted > usable:
        refused.append(
            f"the ladder wants {wanted:,} conversations, and of {have:,} prompts {usable:,} are not held out: give "
            "more prompts, or a shorter ladder"
        )
    needed = math.ceil(size / parts) + int(free * RESERVE)
    if needed > free + there:
        refused.append(
            f"states of {needed / 1e9:,.2f} GB at once (with a reserve of {RESERVE:.0%}) do not fit into "
            f"{(free + there) / 1e9:,.2f} GB: lower states.disk_limit, or move `training` to a larger disk"
        )
    if job.states.disk_limit < job.recipe.sequence_length * job.bytes_a_token:
        refused.append(
            f"states.disk_limit is less than one row of {job.recipe.sequence_length:,} tokens takes "
            f"({job.recipe.sequence_length * job.bytes_a_token:,} bytes)"
        )
    speed = rate or job.rate
    known = a_row is not None and rate is not None
    hours = tokens / speed / 3600
    return Forecast(rows, tokens, size, parts, speed, hours, free, known, tuple(refused))
