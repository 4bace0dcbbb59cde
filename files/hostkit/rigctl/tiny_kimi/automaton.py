"""The tiny target's whole knowledge: each token leads to exactly one next token.

Three chains start at the token that ends a prompt (see `chat_template` in `text_files`):
`<|im_middle|>` thinks and answers, `</think>` answers at once, `<|auto_tool|>` thinks and calls a tool.
A token occurs in one place only, in all chains together; words carry their blank and punctuation.
"""

import itertools
import random
from typing import Literal

THINK, END_THINK = "<think>", "</think>"
END_OF_TURN = "<|im_end|>"
MEDIA_PAD = "<|media_pad|>"

# What a prompt ends with.
CHAT = "<|im_middle|>"
NO_THINKING = END_THINK
TOOL_CALL = "<|auto_tool|>"

REASONING = "Someone asked something; let's think briefly, then reply with what this machine knows."
CONTENT = (
    "Hello! I am a very small stand-in for Kimi, built from plain numbers rather than training. "
    "Every word here follows exactly one other, so whatever you ask, the same paragraph comes back "
    "unchanged. That makes me poor company yet an honest yardstick: when these sentences arrive complete, "
    "your engine loaded its weights, scheduled work, sampled greedily and stopped where it should. "
    "Now try real questions against some bigger model."
)
TOOL_REASONING = (
    "Some tools were offered: fetching current weather data looks sensible first, say Paris using celsius units."
)
TOOL_CALL_ID = "functions.get_weather:0"
TOOL_NAME = "get_weather"
TOOL_ARGUMENTS = {"city": "Paris", "unit": "celsius"}

_TOOL_CALL_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    *("functions", ".get", "_weather", ":0"),
    "<|tool_call_argument_begin|>",
    *('{"city":', ' "Paris",', ' "unit":', ' "celsius"}'),
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)

# The last 20 ids. Those of the first list are "special": detokenizers hide them unless asked not to.
SPECIAL_TOKENS = {
    "[BOS]": 492,
    "[EOS]": 493,
    "[PAD]": 494,
    END_OF_TURN: 495,
    "<|im_user|>": 496,
    "<|im_assistant|>": 497,
    "<|im_system|>": 498,
    CHAT: 499,
    "<|media_begin|>": 500,
    "<|media_content|>": 501,
    "<|media_end|>": 502,
    TOOL_CALL: 503,
    MEDIA_PAD: 505,
}
MARKER_TOKENS = {
    "<|tool_calls_section_begin|>": 504,
    "<|tool_calls_section_end|>": 506,
    "<|tool_call_begin|>": 507,
    "<|tool_call_argument_begin|>": 508,
    "<|tool_call_end|>": 509,
    THINK: 510,
    END_THINK: 511,
}
VOCAB_SIZE = 512
_FIRST_ADDED = min(SPECIAL_TOKENS.values())


def words(text: str) -> tuple[str, ...]:
    """Split into tokens: every word but the first with the blank before it."""
    first, *others = text.split(" ")
    return (first, *(f" {word}" for word in others))


CHAINS: tuple[tuple[str, ...], ...] = (
    (CHAT, THINK, *words(REASONING), END_THINK, *words(CONTENT), END_OF_TURN),
    (TOOL_CALL, *words(TOOL_REASONING), *_TOOL_CALL_TOKENS, END_OF_TURN),
)
FIRST_CONTENT = words(CONTENT)[0]


def successors() -> dict[str, str]:
    """The token after each token of a chain; the end of a turn leads back to the answer."""
    following = {END_OF_TURN: FIRST_CONTENT}
    for chain in CHAINS:
        following |= dict(itertools.pairwise(chain))
    return following


def byte_tokens() -> list[str]:
    """The 256 characters by which byte-level BPE writes single bytes, in id order (`!` is 0)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return [chr(value) for value in printable] + [chr(256 + n) for n in range(len(others))]


def written_form(token: str) -> str:
    """A token of printable ASCII as the vocabulary file spells it (blank is U+0120)."""
    return token.replace(" ", "\u0120")


def word_tokens() -> list[str]:
    """Every chain token that is plain text, in the order of first appearance."""
    added = SPECIAL_TOKENS | MARKER_TOKENS
    return [token for token in dict.fromkeys(itertools.chain(*CHAINS)) if token not in added]


def token_ids() -> dict[str, int]:
    """Token to id: bytes, words, unused ids, then the added tokens. Keys as `written_form` spells them."""
    model = byte_tokens() + [written_form(token) for token in word_tokens()]
    model += [f"<|reserved_{number}|>" for number in range(len(model), _FIRST_ADDED)]
    return {token: number for number, token in enumerate(model)} | SPECIAL_TOKENS | MARKER_TOKENS


def id_of(token: str) -> int:
    return _IDS[written_form(token)]


_IDS = token_ids()


Drafter = Literal["always", "half", "never"]

# Found by search: with 3 speculative tokens exactly half of the drafted tokens are accepted after each of the
# three prompt ends. A token is drafted right with probability 0.7, as p + p^2 + p^3 = 1.5 near p = 0.68.
_HALF_SEED = 17923
_HALF_RIGHT = 0.7
_WRONG_BY = 7


def drafted_successors(drafter: Drafter) -> dict[str, str]:
    """The token that this drafter proposes after each chain token.

    "never" proposes another token's successor, "half" the right one for a random part of the tokens.
    """
    following = successors()
    order = list(dict.fromkeys(following.values()))
    place = {token: number for number, token in enumerate(order)}
    wrong = {token: order[(place[after] + _WRONG_BY) % len(order)] for token, after in following.items()}
    dice = random.Random(_HALF_SEED)  # noqa: S311 (a reproducible choice, no secret)
    half = {token: after if dice.random() < _HALF_RIGHT else wrong[token] for token, after in following.items()}
    return {"always": following, "half": half, "never": wrong}[drafter]
