"""Parts of a decoder that add nothing: attention and MLP outputs are multiplied by zero, norms are 1.

The residual stays the current token's embedding through all layers, so the next token depends on the last one only.
"""

from rigctl.tiny_models.numbers import HIDDEN, Noise, Tensors, ones, zeros


def norms() -> Tensors:
    return {"input_layernorm.weight": ones(HIDDEN), "post_attention_layernorm.weight": ones(HIDDEN)}


def grouped_attention(noise: Noise, heads: int, kv_heads: int, head_dim: int) -> Tensors:
    """Attention with fewer heads for keys and values than for queries, and norms of both."""
    return {
        "self_attn.q_proj.weight": noise(heads * head_dim, HIDDEN),
        "self_attn.k_proj.weight": noise(kv_heads * head_dim, HIDDEN),
        "self_attn.v_proj.weight": noise(kv_heads * head_dim, HIDDEN),
        "self_attn.q_norm.weight": ones(head_dim),
        "self_attn.k_norm.weight": ones(head_dim),
        "self_attn.o_proj.weight": zeros(HIDDEN, heads * head_dim),
    }


def mlp(noise: Noise, prefix: str, width: int) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": noise(width, HIDDEN),
        f"{prefix}.up_proj.weight": noise(width, HIDDEN),
        f"{prefix}.down_proj.weight": zeros(HIDDEN, width),
    }


def experts(noise: Noise, routed: int, width: int, shared: int) -> Tensors:
    """Routed experts and shared ones, each `width` wide."""
    tensors: Tensors = {
        "mlp.gate.weight": noise(routed, HIDDEN),
        "mlp.gate.e_score_correction_bias": zeros(routed),
    }
    for expert in range(routed):
        tensors |= mlp(noise, f"mlp.experts.{expert}", width)
    return tensors | mlp(noise, "mlp.shared_experts", width * shared)
