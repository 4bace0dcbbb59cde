"""A tiny Kimi-K2.5 of many chains: the prompt's last word says which, and a drafter knows what it was trained on alone.

Ten topics of twenty words. A prompt ends with `<|topic-NN|>` for a user's message that ends with NN. No topic's words
are another's: the acceptance of a drafter is its coverage of the topics that are asked for.
"""

from rigctl.tiny_models import kimi
from rigctl.tiny_models.automaton import Automaton, numbered
from rigctl.tiny_models.kimi_files import CHAT_TEMPLATE

COUNT, LENGTH = 10, 20
_FIRST, _VOWELS = "bdfgklmnprstvz", "aeiou"
_BEGIN = "{%- if thinking is defined"


def topic(number: int) -> str:
    """The token that ends a prompt about this topic."""
    return f"<|topic-{number:02d}|>"


def word(number: int) -> str:
    """A word of three syllables, another one for each number below 2,744."""
    parts = [_FIRST[number // 14**place % 14] + _VOWELS[(number + place) % 5] for place in range(3)]
    return f" {''.join(parts)}"


def chain(number: int) -> tuple[str, ...]:
    """What is said about a topic, from the token that ends the prompt to the end of the turn."""
    said = (word(number * LENGTH + place) for place in range(LENGTH))
    return (topic(number), *said, kimi.END_OF_TURN)


TOPICS = Automaton(
    chains=tuple(chain(number) for number in range(COUNT)),
    first_content=chain(0)[1],
    end_of_turn=kimi.END_OF_TURN,
    special={**numbered(492 - COUNT, *(topic(number) for number in range(COUNT))), **kimi.KIMI.special},
    markers=kimi.KIMI.markers,
)
TEMPLATE = CHAT_TEMPLATE[: CHAT_TEMPLATE.index(_BEGIN)] + "<|topic-{{ messages[-1].content[-2:] }}|>{%- endif -%}\n"
