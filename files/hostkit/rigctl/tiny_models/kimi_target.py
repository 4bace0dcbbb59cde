"""Tensors of the target, named as in a Kimi-K2.5 checkpoint (DeepSeek V3 below `language_model.`).

Attention and MLP outputs are multiplied by zero, norms are 1: the residual stays the embedding of the current
token through all layers, so the next token depends on the last one only.
"""

from dataclasses import dataclass

import numpy as np

from rigctl.tiny_models.automaton import Automaton
from rigctl.tiny_models.kimi import KIMI
from rigctl.tiny_models.layers import experts, mlp
from rigctl.tiny_models.numbers import (
    HIDDEN,
    MARKER_ROW,
    Array,
    Noise,
    Tensors,
    embedding,
    hadamard,
    ones,
    right_head,
    zeros,
)

# vLLM's default auxiliary layers (2, N // 2, N - 3) are three different ones from 7 layers on.
LAYERS = 7
DENSE_LAYERS = 1
EXPERTS_PER_TOKEN, SHARED_EXPERTS = 2, 1


@dataclass(frozen=True)
class Shape:
    """Sizes that do not change what the target says. The hidden size is numbers.HIDDEN in all of them."""

    heads: int
    routed_experts: int
    intermediate: int
    moe_intermediate: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


SMALL = Shape(4, 4, 128, 64, q_rank=64, kv_rank=64, nope_dim=64, rope_dim=64, v_dim=64)
# Attention as in Kimi-K2.5's config.json but for the ranks of its queries and the number of heads; everything that
# tensor parallelism divides, divides by 8.
WIDE = Shape(8, 8, 512, 128, q_rank=128, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

# The marked target: this layer adds MARKER_SIZE times an unused direction, the last one takes it away.
MARKED_LAYER = 2
MARKER_SIZE = 4.0
_SEED = 20260201


def target_tensors(
    *, output: Array | None = None, marked: bool = False, shape: Shape = SMALL, automaton: Automaton = KIMI
) -> Tensors:
    """All tensors of the target. `output` replaces its output layer, `marked` adds the marker."""
    noise = Noise(_SEED)
    tensors: Tensors = {"model.embed_tokens.weight": embedding(automaton)}
    for layer in range(LAYERS):
        dense = layer < DENSE_LAYERS
        parts = _attention(noise, shape)
        parts |= (
            mlp(noise, "mlp", shape.intermediate)
            if dense
            else experts(noise, shape.routed_experts, shape.moe_intermediate, SHARED_EXPERTS)
        )
        tensors |= {f"model.layers.{layer}.{name}": values for name, values in parts.items()}
    tensors["model.norm.weight"] = ones(HIDDEN)
    tensors["lm_head.weight"] = right_head(automaton) if output is None else output
    if marked:
        _mark(tensors)
    return {f"language_model.{name}": values for name, values in tensors.items()}


def _attention(noise: Noise, shape: Shape) -> Tensors:
    heads = shape.heads
    return {
        "input_layernorm.weight": ones(HIDDEN),
        "post_attention_layernorm.weight": ones(HIDDEN),
        "self_attn.q_a_proj.weight": noise(shape.q_rank, HIDDEN),
        "self_attn.q_a_layernorm.weight": ones(shape.q_rank),
        "self_attn.q_b_proj.weight": noise(heads * (shape.nope_dim + shape.rope_dim), shape.q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": noise(shape.kv_rank + shape.rope_dim, HIDDEN),
        "self_attn.kv_a_layernorm.weight": ones(shape.kv_rank),
        "self_attn.kv_b_proj.weight": noise(heads * (shape.nope_dim + shape.v_dim), shape.kv_rank),
        "self_attn.o_proj.weight": zeros(HIDDEN, heads * shape.v_dim),
    }


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
