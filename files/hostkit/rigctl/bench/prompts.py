"""The requests of a round: the same for every configuration, different in every round. Pure.

A line of its own opens each prompt, so that no round finds another's prefix in the engine's cache.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence

from rigctl.contract.sweep import SYNTHETIC, Workload

# Common words that tokenizers of large vocabularies hold whole, so that a word is about a token; how many tokens it
# really is gets measured (calibration) and every result counts what the engine counted.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
"""
WORDS = tuple(_COMMON.split())
SYNTHETIC_WORDS = 64


def requests_of(
    workload: Workload, texts: Sequence[str], round_name: str, tokens_a_word: float, count: int | None = None
) -> Iterator[str]:
    """Prompts of one round. texts: the set named by workload.prompts; round_name: unique in the sweep."""
    filler_words = round(workload.context / tokens_a_word)
    for index in range(count if count is not None else workload.requests):
        generator = random.Random(f"{workload.seed}/{workload.id}/{round_name}/{index}")  # noqa: S311  # no secret
        mark = hashlib.sha256(generator.randbytes(16)).hexdigest()[:8]
        parts = [f"Request {mark}."]
        if filler_words:
            parts.append(
                "Notes, not needed for the answer: " + " ".join(generator.choices(WORDS, k=filler_words)) + "."
            )
        if workload.prompts == SYNTHETIC:
            parts.append("Go on with this text: " + " ".join(generator.choices(WORDS, k=SYNTHETIC_WORDS)))
        else:
            parts.append(texts[index % len(texts)])
        yield "\n\n".join(parts)
