"""What a training on a tiny Kimi-K2.5 meets, computed from its automaton: rows of answers, states of every layer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rigctl.tiny_models import kimi_topics, numbers
from rigctl.tiny_models.automaton import Automaton
from rigctl.tiny_models.kimi import CHAT, KIMI, TOOL_CALL
from rigctl.training import states_check
from tests.support.tiny_models import generated_tokens

Row = dict[str, Any]


def prompt_tokens(automaton: Automaton, text: str, end: str) -> list[int]:
    """A prompt of one user message as the chat template writes it: letters are tokens of their own."""
    ids = automaton.special
    before = ["<|im_system|>", CHAT, "<|im_end|>"] if end == TOOL_CALL else []
    said = [automaton.token_ids["\u0120" if letter == " " else letter] for letter in text]
    after = ["<|im_end|>", "<|im_assistant|>", CHAT, *([] if end == CHAT else [end])]
    return [*(ids[one] for one in (*before, "<|im_user|>", CHAT)), *said, *(ids[one] for one in after)]


def row(automaton: Automaton, text: str, end: str) -> Row:
    """One row as `speculators regenerate-responses` writes it: prompt, then the answer, which alone is trained on."""
    prompt = prompt_tokens(automaton, text, end)
    answer = [automaton.id_of(token) for token in generated_tokens(automaton, end)]
    return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def conversations(count: int, seed: int = 1) -> Iterator[Row]:
    """Rows of so many conversations with target-wide: one in four calls a tool, the others are of one turn or two."""
    dice = random.Random(seed)
    words = ["river", "stone", "window", "paper", "garden", "number", "winter", "market", "letter", "engine"]
    for number in range(count):
        text = f"{number} {' '.join(dice.choice(words) for _ in range(dice.randrange(4, 14)))}"
        kind, ends = ("tools", [TOOL_CALL]) if number % 4 == 3 else ("chat", [CHAT] * dice.choice((1, 2)))
        for turn, end in enumerate(ends):
            yield {"conversation": f"{kind}-{number}", "domain": kind, **row(KIMI, f"{text} {turn}", end)}


def topic_conversations(count: int, seed: int, turns: int = 1) -> Iterator[Row]:
    """Rows with `topics`, so many a conversation; the k-th topic is asked for as often as 1 / (k + 1) says."""
    dice = random.Random(seed)
    weights = [1 / (number + 1) for number in range(kimi_topics.COUNT)]
    for number in range(count):
        (chosen,) = dice.choices(range(kimi_topics.COUNT), weights)
        for turn in range(turns):
            said = row(kimi_topics.TOPICS, f"{number} {turn} {chosen:02d}", kimi_topics.topic(chosen))
            yield {"conversation": f"topics-{number}", "domain": "chat", "topic": chosen, **said}


def states_file(automaton: Automaton, tokens: Sequence[int], layers: int = 4) -> bytes:
    """A file of the extraction: every layer's state is the token's embedding, bit for bit."""
    embedding = numbers.to_bf16(numbers.embedding(automaton))
    states = np.ascontiguousarray(np.repeat(embedding[np.array(tokens)][:, None, :], layers, axis=1))
    ids = np.array(tokens, "<i8")
    specs = {states_check.STATES: _spec("bfloat16", states), states_check.TOKENS: _spec("int64", ids)}
    return bytes(safetensors.serialize(specs, {}))


def _spec(dtype: str, values: Any) -> safetensors.TensorSpec:
    return safetensors.TensorSpec(dtype=dtype, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes)


def write_answers(folder: Path, train: Sequence[Row], held_out: Sequence[Row]) -> None:
    """answers/train.jsonl and held_out.jsonl, as the stage `answers` leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def write_states(automaton: Automaton, folder: Path, said: Sequence[Row], rows: Sequence[Row]) -> None:
    """hs_<row>.safetensors of every row of a data set. said: rows.json; rows: those of the answers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {digest(one["input_ids"]): one["input_ids"] for one in rows}
    for number, one in enumerate(said):
        path = folder / f"hs_{number}.safetensors"
        path.write_bytes(states_file(automaton, tokens[str(one["sha256"])]))
        states_check.check(path, layers=4, hidden=numbers.HIDDEN, sha256=str(one["sha256"]))


def digest(tokens: Sequence[int]) -> str:
    """The name of a row's states."""
    return hashlib.sha256(np.array(tokens, "<i8").tobytes()).hexdigest()
