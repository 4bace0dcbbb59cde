"""An engine of numpy that serves a tiny Qwen3 from its files: template, tokenizer, final norm and output layer as they
stand there. What the layers between add is multiplied by zero (`tiny_models.layers`), so they are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import safetensors
from numpy.typing import NDArray

from rigctl.supervisor.specification import Specification
from rigctl.tiny_models.checkpoints import Files
from rigctl.tiny_models.qwen3 import QWEN3
from tests.support.tiny_models import encoded

Array = NDArray[np.float32]


def tensors(files: Files) -> dict[str, Array]:
    """All tensors of a checkpoint, as float32."""
    found = safetensors.deserialize(files["model.safetensors"])  # type: ignore[no-untyped-call]
    return {
        name: (np.frombuffer(bytes(one["data"]), "<u2").astype(np.uint32) << 16).view(np.float32).reshape(one["shape"])
        for name, one in found
    }


class AutomatonEngine:
    """What the canary uses of `Engine`. A request beyond the context is refused, as by the real one."""

    def __init__(self, specification: Specification, files: Files, weights: Mapping[str, Array] | None = None) -> None:
        self.specification, self._template = specification, files["chat_template.jinja"].decode()
        self._weights = weights or tensors(files)
        self._tokens = {number: token for token, number in QWEN3.token_ids.items()}
        self.asked: list[str] = []

    def context(self) -> int:
        return 1024

    def completion(self, prompt: str, *, timeout: float = 300, **parameters: Any) -> dict[str, Any]:
        return self._complete([{"role": "user", "content": prompt}], **parameters)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, timeout: float = 300, **parameters: Any
    ) -> dict[str, Any]:
        choice: dict[str, Any] = self._complete(messages, max_tokens=max_tokens, **parameters)["choices"][0]
        return choice

    def _complete(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, **parameters: Any) -> dict[str, Any]:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # no HTML
        more = parameters.get("chat_template_kwargs", {})
        prompt = environment.from_string(self._template).render(
            messages=messages, tools=parameters.get("tools"), add_generation_prompt=True, **more
        )
        self.asked.append(prompt)
        tokens = encoded(QWEN3, prompt)
        if len(tokens) + max_tokens > self.context():
            raise ValueError(f"{len(tokens)} tokens and {max_tokens} are beyond the context")
        said = self._continued(tokens[-1], max_tokens)
        return {"choices": [{"message": self._parsed(said)}], "usage": {"prompt_tokens": len(tokens)}}

    def _continued(self, last: str, most: int) -> str:
        """The text after a token: residual, norm, output layer, the first of the largest."""
        said = []
        number = QWEN3.id_of(last)
        for _ in range(most):
            residual = self._weights["model.embed_tokens.weight"][number]
            size = np.sqrt(np.mean(residual**2) + 1e-6)
            normed = residual / size * self._weights["model.norm.weight"]
            number = int((self._weights["lm_head.weight"] @ normed).argmax())
            if number in (QWEN3.special["<|im_end|>"], QWEN3.special["[EOS]"]):
                break
            said.append(self._tokens[number])
        return "".join(said).replace("\u0120", " ").replace("\u010a", "\n")

    @staticmethod
    def _parsed(said: str) -> dict[str, Any]:
        """As the parsers qwen3 and hermes part it; reasoning goes on until its end, or a tool call."""
        thought, _, rest = said.partition("</think>") if "<think>" in said or "</think>" in said else ("", "", said)
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
        if calls:
            thought, rest = said.partition("<tool_call>")[0], ""
        found = [json.loads(call) for call in calls]
        functions = [{"name": one["name"], "arguments": json.dumps(one["arguments"])} for one in found]
        return {
            "reasoning": thought.removeprefix("<think>"),
            "content": rest.strip(),
            "tool_calls": [{"function": one} for one in functions],
        }
