"""A tiny model's whole knowledge: each token leads to exactly one next token.

A family (kimi, qwen3, glm) says its chains, each from the token that ends a prompt to the end of the turn. Its
vocabulary is 256 bytes, the words of the chains, and added tokens; words carry their blank and punctuation.
"""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

VOCAB_SIZE = 512

Drafter = Literal["always", "half", "never"]

# A token is drafted right with probability 0.7, as p + p^2 + p^3 = 1.5 near p = 0.68.
_HALF_RIGHT = 0.7
_WRONG_BY = 7

THOUGHT = "Someone asked something; let's think briefly, then reply with what this machine knows."
TOOL_THOUGHT = (
    "Some tools were offered: fetching current weather data looks sensible first, say Paris using celsius units."
)
TOOL_NAME = "get_weather"


def said_by(name: str) -> str:
    """The paragraph that a model of this name answers with. Each word occurs once."""
    return (
        f"Hello! I am a very small stand-in for {name}, built from plain numbers rather than training. "
        "Every word here follows exactly one other, so whatever you ask, the same paragraph comes back "
        "unchanged. That makes me poor company yet an honest yardstick: when these sentences arrive complete, "
        "your engine loaded its weights, scheduled work, sampled greedily and stopped where it should. "
        "Now try real questions against some bigger model."
    )


def words(text: str) -> tuple[str, ...]:
    """Split into tokens: every word but the first with the blank before it."""
    first, *others = text.split(" ")
    return (first, *(f" {word}" for word in others))


def byte_tokens() -> list[str]:
    """The 256 characters by which byte-level BPE writes single bytes, in id order (`!` is 0)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return [chr(value) for value in printable] + [chr(256 + n) for n in range(len(others))]


def written_form(token: str) -> str:
    """A token of ASCII as the vocabulary file spells it (blank is U+0120, line feed U+010A)."""
    return token.replace(" ", "\u0120").replace("\n", "\u010a")


def numbered(first: int, *tokens: str) -> dict[str, int]:
    """Added tokens with ids that follow each other."""
    return {token: first + number for number, token in enumerate(tokens)}


@dataclass(frozen=True, eq=False)
class Automaton:
    """One family's chains and tokens. Every token stands in one place only, in all chains together."""

    chains: tuple[tuple[str, ...], ...]
    """The first one thinks and answers."""
    first_content: str
    """Where every token of no chain leads, and the end of a turn."""
    end_of_turn: str
    special: Mapping[str, int]
    """Added tokens that detokenizers hide unless asked not to. The lowest id of these and `markers` ends the words."""
    markers: Mapping[str, int]
    """Added tokens that they show."""
    half_seed: int = 0
    """Found by search: with 3 speculative tokens the drafter `half` has exactly half of its tokens accepted after each
    of the prompt ends."""

    @property
    def added(self) -> dict[str, int]:
        return {**self.special, **self.markers}

    @cached_property
    def following(self) -> dict[str, str]:
        """The token after each token of a chain; the end of a turn leads back to the answer."""
        found = {self.end_of_turn: self.first_content}
        for chain in self.chains:
            found |= dict(itertools.pairwise(chain))
        return found

    @property
    def states(self) -> list[str]:
        """The tokens of the chains, in the order of first appearance."""
        return list(dict.fromkeys(itertools.chain(*self.chains)))

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Token to id: bytes, words, unused ids, then the added tokens. Keys as `written_form` spells them."""
        model = byte_tokens()
        model += [written_form(token) for token in self.states if token not in self.added]
        model += [f"<|reserved_{number}|>" for number in range(len(model), min(self.added.values()))]
        return {token: number for number, token in enumerate(model)} | self.added

    def id_of(self, token: str) -> int:
        return self.token_ids[written_form(token)]

    def drafted(self, drafter: Drafter) -> dict[str, str]:
        """The token that this drafter proposes after each chain token.

        "never" proposes another token's successor, "half" the right one for a random part of the tokens.
        """
        order = list(dict.fromkeys(self.following.values()))
        place = {token: number for number, token in enumerate(order)}
        wrong = {token: order[(place[after] + _WRONG_BY) % len(order)] for token, after in self.following.items()}
        dice = random.Random(self.half_seed)  # noqa: S311 (a reproducible choice, no secret)
        half = {
            token: after if dice.random() < _HALF_RIGHT else wrong[token] for token, after in self.following.items()
        }
        return {"always": self.following, "half": half, "never": wrong}[drafter]
