"""Acceptance of drafted tokens in one unit, and the engines' own rates with their definitions. Pure.

The unit is the acceptance length: tokens a target step yields, 1 + accepted drafts a step. It needs no knowledge of how
many tokens were drafted, so it is the same thing in every engine.
"""

from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from rigctl.contract.order import Part


class Drafting(Part):
    """How an engine drafts: steps is the number of drafted tokens a step, draft_tokens what SGLang verifies.

    With topk 1 SGLang verifies steps + 1 tokens, the last one known to be right (engines.md, section 2).
    """

    steps: int
    draft_tokens: int | None = None

    @property
    def verified(self) -> int:
        """Tokens a step verifies, in SGLang's counting."""
        return self.draft_tokens or self.steps + 1


@dataclass(frozen=True)
class RateDefinition:
    """An engine's own acceptance rate: what it divides by what, and how that becomes a length."""

    key: str
    words: str
    to_length: Callable[[float, Drafting], float]


DEFINITIONS = {
    definition.key: definition
    for definition in (
        RateDefinition(
            "vllm",
            "accepted / drafted tokens, without the bonus token (vLLM, every release)",
            lambda rate, drafting: 1 + rate * drafting.steps,
        ),
        RateDefinition(
            "sglang-gauge-old",
            "accepted tokens with the bonus token / all draft tokens "
            "(log line and gauge of SGLang up to 0.5.10.post1, scheduler_metrics_mixin.py): a drafter that is never "
            "right shows 1 / draft tokens",
            lambda rate, drafting: rate * drafting.verified,
        ),
        RateDefinition(
            "sglang-request",
            "accepted drafts / (draft tokens - 1), without the bonus token (meta_info of a request in SGLang)",
            lambda rate, drafting: 1 + rate * (drafting.verified - 1),
        ),
        RateDefinition(
            "sglang-gauge",
            "accepted drafts / (draft tokens - 1), without the bonus token (gauge of SGLang from 0.5.11)",
            lambda rate, drafting: 1 + rate * (drafting.verified - 1),
        ),
    )
}


def own_rate_definition(engine: str, version: str) -> RateDefinition:
    """The definition behind the rate that this release logs and exports. Raises KeyError for an unknown engine."""
    if engine == "sglang":
        return DEFINITIONS["sglang-gauge-old" if Version(version) < Version("0.5.11") else "sglang-gauge"]
    return DEFINITIONS[engine]


def proper_rate(length: float, steps: int) -> float:
    """Accepted share of the drafted tokens (0 to 1, bonus token not counted) that belongs to an acceptance length."""
    return (length - 1) / steps


def step_cost(length: float, speedup: float) -> float:
    """What a speculative step costs, in steps of the base configuration.

    length: acceptance length; speedup: speculative over base tok/s, both at the same concurrency. Since a step yields
    `length` tokens, it is also the break-even length: with less acceptance, no drafter is faster.
    """
    return length / speedup


# The operator's bands for the proper rate (design.md): about 42 % is in doubt, 60 to 80 % is validated, 70 to 80 % is
# expected to give two to three times the speed.
BANDS = (
    (0.60, "in doubt (below the operator's 60 %)"),
    (0.70, "validated (the operator's 60 to 80 %)"),
    (0.80, "validated; 70 to 80 % is expected to give 2 to 3 times the speed"),
)


def band(rate: float) -> str:
    """The operator's judgement of a proper acceptance rate."""
    above = "at or above the operator's band of 60 to 80 %"
    return next((words for below, words in BANDS if rate < below), above)
