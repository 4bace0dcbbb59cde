"""What the tiny Kimi-K2.5 says.

Three chains start at the token that ends a prompt (`kimi_files.CHAT_TEMPLATE`): `<|im_middle|>` thinks and answers,
`</think>` answers at once, `<|auto_tool|>` thinks and calls a tool. `</think>` has one successor, so the tool's chain
goes without it: the parser ends the reasoning at the call's own marker.
"""

from rigctl.tiny_models.automaton import THOUGHT, TOOL_THOUGHT, Automaton, said_by, words

THINK, END_THINK = "<think>", "</think>"
END_OF_TURN = "<|im_end|>"
MEDIA_PAD = "<|media_pad|>"

# What a prompt ends with.
CHAT = "<|im_middle|>"
NO_THINKING = END_THINK
TOOL_CALL = "<|auto_tool|>"

CONTENT = said_by("Kimi")
TOOL_CALL_ID = "functions.get_weather:0"
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
_SPECIAL = {
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
_MARKERS = {
    "<|tool_calls_section_begin|>": 504,
    "<|tool_calls_section_end|>": 506,
    "<|tool_call_begin|>": 507,
    "<|tool_call_argument_begin|>": 508,
    "<|tool_call_end|>": 509,
    THINK: 510,
    END_THINK: 511,
}

KIMI = Automaton(
    chains=(
        (CHAT, THINK, *words(THOUGHT), END_THINK, *words(CONTENT), END_OF_TURN),
        (TOOL_CALL, *words(TOOL_THOUGHT), *_TOOL_CALL_TOKENS, END_OF_TURN),
    ),
    first_content=words(CONTENT)[0],
    end_of_turn=END_OF_TURN,
    special=_SPECIAL,
    markers=_MARKERS,
    half_seed=17923,
)
