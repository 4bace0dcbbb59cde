"""What the tiny models say, and the engine's counters that follow from what is drafted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rigctl.tiny_models import glm, qwen3
from rigctl.tiny_models.automaton import Automaton, Drafter, byte_tokens, written_form
from rigctl.tiny_models.glm import GLM
from rigctl.tiny_models.qwen3 import QWEN3

Propose = Callable[[Sequence[str]], Sequence[str]]
"""All tokens so far -> the next ones that are drafted."""


@dataclass(frozen=True)
class Prediction:
    """Increase of vLLM's `spec_decode` counters by one greedy request, and the tokens it returns."""

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    output_tokens: int

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens, 0 to 1; 0 without drafts."""
        return self.accepted / self.draft_tokens if self.draft_tokens else 0.0


def generated_tokens(automaton: Automaton, prompt_end: str) -> tuple[str, ...]:
    """What the target emits after a prompt that ends with this token, up to and with the end of turn."""
    token, emitted = prompt_end, []
    while token != automaton.end_of_turn:
        token = automaton.following.get(token, automaton.first_content)
        emitted.append(token)
    return tuple(emitted)


def predict_counters(
    automaton: Automaton,
    prompt_end: str | Sequence[str],
    drafter: Drafter | Mapping[str, str] | Propose | None,
    num_speculative_tokens: int,
    *,
    max_tokens: int | None = None,
    ignore_eos: bool = False,
) -> Prediction:
    """Simulate one greedy request of vLLM.

    `prompt_end` is the prompt's last token, or all of its tokens. The prefill yields the first token; each further step
    checks what is drafted, at most `num_speculative_tokens`, and yields the accepted ones and one more. A step without
    a draft counts none. Drafts beyond the end of the turn or beyond `max_tokens` count in the step that passes it.
    `drafter` may be a map from a token to the one that is proposed after it, or a function (`ngram`).
    """
    if ignore_eos and max_tokens is None:
        raise ValueError("ignore_eos needs max_tokens: the chain never ends")
    following, width = automaton.following, num_speculative_tokens if drafter else 0
    text = [prompt_end] if isinstance(prompt_end, str) else [*prompt_end]
    propose = _proposer(automaton.drafted(drafter) if isinstance(drafter, str) else drafter, width)
    text.append(following.get(text[-1], automaton.first_content))
    output, drafts, drafted, per_position = 1, 0, 0, [0] * width

    def ended() -> bool:
        return (text[-1] == automaton.end_of_turn and not ignore_eos) or output == max_tokens

    while not ended():
        proposed = propose(text)[:width]
        accepted = _right_drafts(text[-1], proposed, following)
        drafts += bool(proposed)
        drafted += len(proposed)
        for position in range(accepted):
            per_position[position] += 1
        for _ in range(accepted + 1):
            text.append(following[text[-1]])
            output += 1
            if ended():
                break
    return Prediction(drafts, drafted, sum(per_position), tuple(per_position), output)


def _proposer(drafter: Mapping[str, str] | Propose | None, width: int) -> Propose:
    if callable(drafter):
        return drafter

    def chain(text: Sequence[str]) -> list[str]:
        token, proposed = text[-1], list[str]()
        for _ in range(width if drafter else 0):
            token = drafter[token] if drafter else ""
            proposed.append(token)
        return proposed

    return chain


def _right_drafts(token: str, proposed: Sequence[str], following: Mapping[str, str]) -> int:
    for count, proposal in enumerate(proposed):
        if proposal != following[token]:
            return count
        token = proposal
    return len(proposed)


def ngram(steps: int, least: int = 5, most: int = 5) -> Propose:
    """vLLM's n-gram proposer (v1/spec_decode/ngram_proposer.py): what follows the earliest place where the longest of
    the last `least` to `most` tokens stood before. vLLM takes 5 for both unless prompt_lookup_min and _max say other.
    """

    def propose(text: Sequence[str]) -> Sequence[str]:
        for length in range(min(most, len(text) - 1), least - 1, -1):
            end = tuple(text[-length:])
            for start in range(len(text) - length):
                if tuple(text[start : start + length]) == end:
                    return text[start + length : start + length + steps]
        return ()

    return propose


def encoded(automaton: Automaton, text: str) -> list[str]:
    """Tokens of a text as the tokenizer with whole words splits it (`text_files.WHOLE_WORDS`): added tokens, words of
    the vocabulary with the blank before them, and bytes."""
    tokens: list[str] = []
    added = "|".join(map(re.escape, sorted(automaton.added, key=len, reverse=True)))
    printable = dict(zip(_byte_order(), byte_tokens(), strict=True))
    for part in re.split(f"({added})", text):
        for word in [part] if part in automaton.added else re.findall(" ?[^ ]+| +", part):
            known = word in automaton.added or written_form(word) in automaton.token_ids
            tokens += [word] if known else [printable[value] for value in word.encode()]
    return tokens


def _byte_order() -> list[int]:
    """The byte of each of the first 256 ids."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [value for value in range(256) if value not in set(printable)]


SAID_AGAIN = f"Say this again: {qwen3.CONTENT}"
PLAIN = "What is a token?"


def rendered(template: str, question: str, **more: Any) -> str:
    """The prompt of one question, as engines render chat templates."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # no HTML
    messages = [{"role": "user", "content": question}]
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **more)


def predicted(case: str) -> Prediction:
    """Counters of one request: model/what is asked/drafted tokens a step."""
    model, asked, steps = case.split("/")
    if model == "qwen3":
        prompt = rendered(qwen3.CHAT_TEMPLATE, {"repeated": SAID_AGAIN, "plain": PLAIN}[asked])
        return predict_counters(QWEN3, encoded(QWEN3, prompt), ngram(int(steps)), int(steps))
    ends = {"chat": glm.CHAT, "no_thinking": glm.NO_THINKING}
    drafters: Mapping[str, Drafter] = {"glm-always": "always", "glm-half": "half", "glm-never": "never"}
    return predict_counters(GLM, ends[asked], drafters[model], int(steps))


_FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_models.json"
PREDICTED = {
    case: Prediction(**{**found, "accepted_per_position": tuple(found["accepted_per_position"])})
    for case, found in json.loads(_FIXTURE.read_text(encoding="utf-8")).items()
}
"""By case, what a real engine must count; written before one was asked. No tool call of the tiny GLM: the engine holds
its calls to a grammar, which took 2 of 30 drafted tokens away (vLLM 0.32.0, `default_tool_strict_level`)."""
