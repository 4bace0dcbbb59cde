"""A tiny Kimi-K2.5 in vLLM's CPU build: its auxiliary hidden states against a layer-by-layer reference.

Run by the interpreter of a patched environment: `python forward.py MODEL_DIRECTORY ANSWER_FILE`.
The reference walks the same layers by hand, in the same forward context, without the patched method.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

LAYERS = (1, 4, 6)
TOKENS = [7, 21, 3, 400, 56, 7, 88, 130, 12, 9, 301]

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiling helpers for one request would take longer than the rest
}


def module(name: str) -> Any:
    """A module that only the engine's environment has."""
    return importlib.import_module(name)


def randomise(model: Any, torch: Any) -> None:
    """Weights large enough for every layer to change its input visibly; norms at one."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.05)


def layer_inputs(model: Any, positions: Any, hidden: Any) -> list[Any]:
    """The input of every layer (and the last output), residual included."""
    residual = None
    inputs = []
    for layer in model.layers:
        inputs.append(hidden if residual is None else hidden + residual)
        hidden, residual = layer(positions, hidden, residual, None)
    return [*inputs, hidden + residual]


def largest_difference(torch: Any, left: list[Any], right: list[Any]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def main(model_directory: str, answer: Path) -> None:
    torch, vllm = module("torch"), module("vllm")
    kimi_k25 = module("vllm.model_executor.models.kimi_k25")

    # Text only: processor and tokenizer belong to the checkpoint's own code, and token ids are given.
    kimi_k25.cached_get_image_processor = MagicMock()
    kimi_k25.MoonshotKimiVAutoProcessor = MagicMock()
    kimi_k25.KimiK25ProcessingInfo.get_tokenizer = MagicMock()
    llm = vllm.LLM(
        model=model_directory,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        limit_mm_per_prompt={"vision_chunk": 0},
        enable_prefix_caching=False,
    )
    outer = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    model = outer.language_model.model
    randomise(outer, torch)
    outer.set_aux_hidden_state_layers(LAYERS)
    result: dict[str, Any] = {"default_layers": outer.get_eagle3_aux_hidden_state_layers()}
    patched_forward = model.forward

    def compare(input_ids: Any, positions: Any, intermediate: Any, inputs_embeds: Any = None) -> Any:
        hidden, auxiliary = patched_forward(input_ids, positions, intermediate, inputs_embeds)
        if "shape" not in result and positions.numel() >= len(TOKENS):
            embedded = model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            inputs = layer_inputs(model, positions, embedded)
            result["shape"] = [list(each.shape) for each in auxiliary]
            result["scale"] = float(inputs[LAYERS[-1]].abs().max())
            for shift in (-1, 0, 1):
                reference = [inputs[layer + shift] for layer in LAYERS]
                result[f"allclose_{shift}"] = all(map(torch.allclose, auxiliary, reference))
                result[f"difference_{shift}"] = largest_difference(torch, auxiliary, reference)
        return hidden

    model.forward = compare
    llm.generate({"prompt_token_ids": TOKENS}, vllm.SamplingParams(max_tokens=2, detokenize=False))
    try:
        outer.set_aux_hidden_state_layers((2, 30, 58))
    except ValueError as error:
        result["refused"] = str(error)
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
