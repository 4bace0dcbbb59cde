"""What a training on the tiny Kimi-K2.5 meets, computed from its automaton: answers, their rows, the states of
every layer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rigctl.tiny_kimi import numbers
from rigctl.tiny_kimi.automaton import CHAT, SPECIAL_TOKENS, TOOL_CALL, id_of, token_ids
from rigctl.training import states_check
from tests.support.tiny_kimi import generated_tokens

_IDS = token_ids()


def prompt_tokens(text: str, end: str, *, tools: bool = False) -> list[int]:
    """A prompt of one user message as the chat template writes it: letters are tokens of their own."""
    special = SPECIAL_TOKENS
    before = [special["<|im_system|>"], special["<|im_middle|>"], special["<|im_end|>"]] if tools else []
    said = [_IDS["\u0120" if letter == " " else letter] for letter in text]
    after = [special["<|im_end|>"], special["<|im_assistant|>"], special["<|im_middle|>"]]
    last = [] if end == CHAT else [id_of(end)]
    return [*before, special["<|im_user|>"], special["<|im_middle|>"], *said, *after, *last]


def row(text: str, end: str) -> dict[str, Any]:
    """One row as `speculators regenerate-responses` writes it: prompt, then the answer, which alone is trained on."""
    prompt = prompt_tokens(text, end, tools=end == TOOL_CALL)
    answer = [id_of(token) for token in generated_tokens(end)]
    return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def conversations(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Rows of so many conversations: one in four calls a tool, the others answer one or two turns."""
    dice = random.Random(seed)
    words = ["river", "stone", "window", "paper", "garden", "number", "winter", "market", "letter", "engine"]
    for number in range(count):
        text = f"{number} {' '.join(dice.choice(words) for _ in range(dice.randrange(4, 14)))}"
        name, ends = (
            (f"tools-{number}", [TOOL_CALL]) if number % 4 == 3 else (f"chat-{number}", [CHAT] * dice.choice((1, 2)))
        )
        for turn, end in enumerate(ends):
            yield {"conversation": name, "domain": name.partition("-")[0], **row(f"{text} {turn}", end)}


def states_file(tokens: Sequence[int], layers: int = 4) -> bytes:
    """A file of the extraction: every layer's state is the token's embedding, bit for bit."""
    embedding = numbers.to_bf16(numbers.embedding())
    states = np.ascontiguousarray(np.repeat(embedding[np.array(tokens)][:, None, :], layers, axis=1))
    ids = np.array(tokens, "<i8")
    specs = {
        states_check.STATES: _spec("bfloat16", states),
        states_check.TOKENS: _spec("int64", ids),
    }
    return bytes(safetensors.serialize(specs, {}))


def _spec(dtype: str, values: Any) -> safetensors.TensorSpec:
    return safetensors.TensorSpec(dtype=dtype, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes)


def write_answers(folder: Path, train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> None:
    """answers/train.jsonl and held_out.jsonl, as the stage `answers` leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def digest(tokens: Sequence[int]) -> str:
    """The name of a row's states."""
    return hashlib.sha256(np.array(tokens, "<i8").tobytes()).hexdigest()
