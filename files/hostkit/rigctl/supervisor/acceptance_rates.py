"""The engines' own acceptance rates are not one unit: what each means, and the acceptance length it stands for.

SGLang up to 0.5.10.post1 divides the accepted tokens with the bonus token by all draft tokens
(managers/scheduler_metrics_mixin.py), so that a drafter that is never right shows 1/4 with 4 draft tokens. vLLM, and
SGLang from 0.5.11, leave the bonus token out and divide by what was really drafted.
"""

from __future__ import annotations

WITH_BONUS = "accepted tokens with the bonus token / all draft tokens"
WITHOUT_BONUS = "accepted tokens without the bonus token / drafted tokens"


def definition(counts_bonus: bool) -> str:
    """The definition in words."""
    return WITH_BONUS if counts_bonus else WITHOUT_BONUS


def acceptance_length(rate: float, draft_tokens: int, *, counts_bonus: bool) -> float:
    """Tokens a step yields (1 + accepted drafts) for an engine's own rate (0 to 1).

    draft_tokens: SGLang's --speculative-num-draft-tokens; for vLLM num_speculative_tokens + 1.
    """
    return rate * draft_tokens if counts_bonus else 1 + rate * (draft_tokens - 1)
