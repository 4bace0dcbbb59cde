"""Tensors of the target, named as in a Kimi-K2.5 checkpoint (DeepSeek V3 below `language_model.`).

Attention and MLP outputs are multiplied by zero, norms are 1: the residual stays the embedding of the current
token through all layers, so the next token depends on the last one only.
"""

from __future__ import annotations

import numpy as np

from rigctl.tiny_kimi.automaton import VOCAB_SIZE
from rigctl.tiny_kimi.numbers import (
    HIDDEN,
    MARKER_ROW,
    Array,
    Noise,
    Tensors,
    embedding,
    hadamard,
    ones,
    target_head,
    zeros,
)

# vLLM's default auxiliary layers (2, N // 2, N - 3) are three different ones from 7 layers on.
LAYERS = 7
DENSE_LAYERS = 1
INTERMEDIATE, MOE_INTERMEDIATE = 128, 64
ROUTED_EXPERTS, EXPERTS_PER_TOKEN, SHARED_EXPERTS = 4, 2, 1
HEADS = 4
Q_RANK, KV_RANK = 64, 64
NOPE_DIM, ROPE_DIM, V_DIM = 64, 64, 64

# The marked target: this layer adds MARKER_SIZE times an unused direction, the last one takes it away.
MARKED_LAYER = 2
MARKER_SIZE = 4.0
_SEED = 20260201


def target_tensors(*, output: Array | None = None, marked: bool = False) -> Tensors:
    """All tensors of the target. `output` replaces its output layer, `marked` adds the marker."""
    noise = Noise(_SEED)
    tensors: Tensors = {"model.embed_tokens.weight": embedding()}
    for layer in range(LAYERS):
        parts = _attention(noise) | (_dense(noise) if layer < DENSE_LAYERS else _experts(noise))
        tensors |= {f"model.layers.{layer}.{name}": values for name, values in parts.items()}
    tensors["model.norm.weight"] = ones(HIDDEN)
    tensors["lm_head.weight"] = target_head() if output is None else output
    if marked:
        _mark(tensors)
    return {f"language_model.{name}": values for name, values in tensors.items()}


def degenerate_head() -> Array:
    """Every token leads to token 0 (`!`): column 0 of every embedding is +1."""
    weights = zeros(VOCAB_SIZE, HIDDEN)
    weights[0, 0] = 64
    return weights


def _attention(noise: Noise) -> Tensors:
    return {
        "input_layernorm.weight": ones(HIDDEN),
        "post_attention_layernorm.weight": ones(HIDDEN),
        "self_attn.q_a_proj.weight": noise(Q_RANK, HIDDEN),
        "self_attn.q_a_layernorm.weight": ones(Q_RANK),
        "self_attn.q_b_proj.weight": noise(HEADS * (NOPE_DIM + ROPE_DIM), Q_RANK),
        "self_attn.kv_a_proj_with_mqa.weight": noise(KV_RANK + ROPE_DIM, HIDDEN),
        "self_attn.kv_a_layernorm.weight": ones(KV_RANK),
        "self_attn.kv_b_proj.weight": noise(HEADS * (NOPE_DIM + V_DIM), KV_RANK),
        "self_attn.o_proj.weight": zeros(HIDDEN, HEADS * V_DIM),
    }


def _mlp(noise: Noise, prefix: str, width: int) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": noise(width, HIDDEN),
        f"{prefix}.up_proj.weight": noise(width, HIDDEN),
        f"{prefix}.down_proj.weight": zeros(HIDDEN, width),
    }


def _dense(noise: Noise) -> Tensors:
    return _mlp(noise, "mlp", INTERMEDIATE)


def _experts(noise: Noise) -> Tensors:
    tensors: Tensors = {
        "mlp.gate.weight": noise(ROUTED_EXPERTS, HIDDEN),
        "mlp.gate.e_score_correction_bias": zeros(ROUTED_EXPERTS),
    }
    for expert in range(ROUTED_EXPERTS):
        tensors |= _mlp(noise, f"mlp.experts.{expert}", MOE_INTERMEDIATE)
    return tensors | _mlp(noise, "mlp.shared_experts", MOE_INTERMEDIATE * SHARED_EXPERTS)


def _mark(tensors: Tensors) -> None:
    """Let one unit of two shared experts, driven by the constant column 0, add and remove the marker."""
    marker = hadamard()[MARKER_ROW]
    # What the last layer reads in column 0: (1 + MARKER_SIZE) of a residual with RMS sqrt(1 + MARKER_SIZE^2).
    seen_last = (1 + MARKER_SIZE) / np.sqrt(1 + MARKER_SIZE**2)
    for layer, seen, direction in ((MARKED_LAYER, 1.0, marker), (LAYERS - 1, float(seen_last), -marker)):
        prefix = f"model.layers.{layer}.mlp.shared_experts"
        gate, up, down = (tensors[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gate[0], up[0] = 0, 0
        gate[0, 0], up[0, 0] = 8 / seen, MARKER_SIZE / 8 / seen  # silu(8) is 8 to within 0.03 %
        down[:, 0] = direction
