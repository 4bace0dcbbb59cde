"""evaluation.json of a training: what every drafter of the ladder, and those that exist already, did with held-out
prompts.

Written by rigctl/training/evaluate.py, read by `publish` and the report. Lengths are acceptance lengths: tokens that a
step yields, 1 without a right draft.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Annotated

from pydantic import Field

from rigctl.contract.fields import Count, Positive, Text
from rigctl.contract.order import Order, Part

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Difference = Annotated[float, Field(allow_inf_nan=False)]

PLAIN_LOSS = 0.25
"""Acceptance at the first position below which wrong features are likelier than a poor drafter: vllm#43671 saw 10 %
there
with ids one off, 45 % with the right ones."""
ENOUGH_TO_BEGIN = 100_000
"""Samples below which a drafter that begins untrained, or from another model's, does not compete: published ones had
300,000
and more (cards of lightseekorg/kimi-k2.5-eagle3), speculators#751 advises 500,000."""
SMALL_STEP = 1e-4
"""Learning rates below this vanish in bfloat16 weights: AdamW moves a weight by about the rate, bfloat16 has 8 bits."""


class Asked(Part):
    """One held-out prompt in one engine, alone, at temperature 0."""

    conversation: Text
    domain: Text
    tokens: Count
    drafts: Count
    accepted: Count
    identical: bool
    """Whether the answer is that of the same engine without a drafter."""

    @property
    def length(self) -> float | None:
        return 1 + self.accepted / self.drafts if self.drafts else None


class Speed(Part):
    """Output tokens a second of so many streams at once, with and without the drafter."""

    streams: Positive
    base: Number
    drafting: Number


class InEngine(Part):
    """A drafter in one serving configuration. positions: accepted drafts by position, where the engine counts them."""

    steps: Positive
    asked: list[Asked]
    positions: list[Count] = []
    speeds: list[Speed] = []

    @property
    def length(self) -> float:
        return length(self.asked)

    def first_position(self) -> float | None:
        """Share of the first drafts that were right."""
        drafts = sum(one.drafts for one in self.asked)
        return self.positions[0] / drafts if self.positions and drafts else None


class Origin(Part):
    """What is known of how a drafter was made. None: not known."""

    target: Text | None = None
    samples: Count | None = None
    begun_with: Text | None = None
    """Target of the drafter that it continues."""
    states_engine: Text | None = None
    learning_rate: Number | None = None
    dtype: Text | None = None
    """Of the weights while they were trained."""


class Drafter(Part):
    """One drafter. rung: conversations of the ladder that it was trained on; None for one that existed already."""

    rung: Count | None
    origin: Origin
    offline: list[Number] = []
    """Share of held-out tokens right at each position and all before it, by the trainer's own validation."""
    engines: dict[Text, InEngine]

    @property
    def offline_length(self) -> float | None:
        return 1 + sum(self.offline) if self.offline else None

    @property
    def length(self) -> float:
        """The mean over engines."""
        return fmean([one.length for one in self.engines.values()] or [1.0])


class Cost(Part):
    """What a training conversation has cost on this host. rate: tokens a second of extraction."""

    tokens_a_conversation: Number
    bytes_a_token: Positive
    rate: Number


class Evaluation(Order):
    """All of one training."""

    name: Text
    target: Text
    drafters: dict[Text, Drafter]
    cost: Cost
    findings: list[Text] = []


def length(asked: Iterable[Asked]) -> float:
    """Of all steps together; 1 where nothing was drafted."""
    rows = list(asked)
    drafts = sum(one.drafts for one in rows)
    return 1 + sum(one.accepted for one in rows) / drafts if drafts else 1.0


def by_domain(asked: Iterable[Asked]) -> dict[str, float]:
    """Acceptance length of each domain."""
    found: dict[str, list[Asked]] = {}
    for one in asked:
        found.setdefault(one.domain, []).append(one)
    return {domain: length(rows) for domain, rows in sorted(found.items())}


def break_even(engine: InEngine, speed: Speed) -> float | None:
    """The length at which base and drafter would be equally fast there: what a step costs in steps of the base."""
    return engine.length * speed.base / speed.drafting if speed.drafting else None


def paired(one: Sequence[Asked], other: Sequence[Asked]) -> tuple[float, float, int] | None:
    """Mean difference of lengths on the same prompts, its standard error, and their number; None below two prompts."""
    mine = {asked.conversation: asked.length for asked in one}
    both = [
        (mine[asked.conversation], asked.length)
        for asked in other
        if mine.get(asked.conversation) is not None and asked.length is not None
    ]
    gaps = [there - here for here, there in both if here is not None and there is not None]
    if len(gaps) < 2:
        return None
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps)), len(gaps)


def slope(rungs: Mapping[int, float]) -> float | None:
    """Gain of length a tenfold of conversations, between the two largest rungs that were trained."""
    known = sorted((count, found) for count, found in rungs.items() if count > 0)
    if len(known) < 2:
        return None
    (fewer, before), (more, after) = known[-2:]
    return (after - before) / math.log10(more / fewer)


def next_rung(evaluation: Evaluation, times: int = 10) -> str | None:
    """What so many times the largest rung would cost, and what it might bring if length goes on as between the last
    two."""
    rungs = {one.rung: one.length for one in evaluation.drafters.values() if one.rung}
    if not rungs:
        return None
    more = max(rungs) * times
    tokens = more * evaluation.cost.tokens_a_conversation
    hours = tokens / evaluation.cost.rate / 3600 if evaluation.cost.rate else None
    takes = f", {hours:.1f} hours of extraction" if hours is not None else ""
    text = (
        f"{more:,} conversations would be {tokens / 1e6:,.1f} M tokens, "
        f"{tokens * evaluation.cost.bytes_a_token / 1e9:,.0f} GB of states{takes}"
    )
    gain = slope(rungs)
    if gain is None:
        return f"{text}; what they bring cannot be said from one rung"
    steps = max((engine.steps for one in evaluation.drafters.values() for engine in one.engines.values()), default=3)
    reached = min(1.0 + steps, max(1.0, rungs[max(rungs)] + gain * math.log10(times)))
    return f"{text}; if length grows as between the last two rungs, it comes to {reached:.2f}"


def paying(evaluation: Evaluation) -> list[str]:
    """Which drafter is fastest at each number of streams in each engine, the base among them."""
    best: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for name, drafter in evaluation.drafters.items():
        for engine, found in drafter.engines.items():
            for speed in found.speeds:
                pairs = best.setdefault((engine, speed.streams), [(speed.base, "no drafter")])
                pairs.append((speed.drafting, name))
    lines = []
    for (engine, streams), pairs in sorted(best.items()):
        rate, name = max(pairs, key=lambda one: one[0])
        base = max(base for base, which in pairs if which == "no drafter")
        gain = f", {rate / base:.2f} times the base" if base and name != "no drafter" else ""
        lines.append(f"{engine}, {streams} stream{'s' if streams > 1 else ''}: {name} ({rate:,.0f} tok/s{gain})")
    return lines


def suspects(name: str, drafter: Drafter, target: str) -> list[str]:
    """What may be wrong with a drafter that does badly: each with what points to it."""
    origin, found = drafter.origin, []
    if origin.target not in (None, target):
        found.append(f"{name} was trained for {origin.target}, not {target}: another model says other words")
    first = [one for engine in drafter.engines.values() if (one := engine.first_position()) is not None]
    if first and min(first) < PLAIN_LOSS and (drafter.offline[:1] or [0])[0] > 2 * min(first):
        found.append(
            f"{name} is right at the first position in {drafter.offline[0]:.0%} of the tokens by the trainer's "
            f"validation and in {min(first):.0%} in the engine, which feeds it other states: layer ids one off, or "
            "another engine's"
        )
    elif first and not drafter.offline and min(first) < PLAIN_LOSS:
        found.append(
            f"{name} is right at the first position in {min(first):.0%}: so are shifted layer ids (vllm#43671)"
        )
    others = sorted(engine for engine in drafter.engines if origin.states_engine and origin.states_engine not in engine)
    if others and len(others) < len(drafter.engines):
        here = next(one for name_of, one in drafter.engines.items() if name_of not in others)
        for other in others:
            if (gap := paired(here.asked, drafter.engines[other].asked)) and gap[0] < -2 * gap[1]:
                found.append(
                    f"{name} learnt from states of {origin.states_engine} and is {-gap[0]:.2f} +- {gap[1]:.2f} "
                    f"shorter in {other}"
                )
    continued = origin.begun_with == target
    if origin.samples is not None and origin.samples < ENOUGH_TO_BEGIN and not continued and origin.samples:
        begun = f"from a drafter for {origin.begun_with}" if origin.begun_with else "untrained"
        found.append(
            f"{name} begins {begun} with {origin.samples:,} samples: so few continue a drafter of {target}, "
            "they do not make one"
        )
    if origin.dtype == "bfloat16" and origin.learning_rate is not None and origin.learning_rate < SMALL_STEP:
        found.append(
            f"{name} was trained in bfloat16 at a rate of {origin.learning_rate:g}: most of its steps round to "
            "nothing; start from a float32 copy"
        )
    return found
