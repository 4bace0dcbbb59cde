"""The drafter's shape: a Llama layer that every release of the catalogue serves as it was trained (portable.py)."""

from collections.abc import Mapping
from typing import Any

from rigctl.errors import RigctlError

HEAD_DIM = 128
"""As the published drafters for Kimi-K2 and K2.5; without one of its own it would get the target's 64
(qk_rope_head_dim)."""
FLAGS = ("--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output")
"""What speculators 0.9.0 switches on and older releases cannot serve."""
OWN = ("hidden_size", "vocab_size")
"""Keys that follow from the target; a draft configuration that says otherwise cannot be fed."""


def draft_config(target: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of `speculators train --draft-config`. target: the text view's config; wanted: keys of the order.

    Raises RigctlError for a key that contradicts the target or the portable shape.
    """
    hidden = int(target["hidden_size"])
    head_dim = int(wanted.get("head_dim", HEAD_DIM))
    heads = int(wanted.get("num_attention_heads", max(1, hidden // head_dim)))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": int(target["vocab_size"]),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": int(target.get("intermediate_size", 4 * hidden)),
        "hidden_act": "silu",
        "rms_norm_eps": float(target.get("rms_norm_eps", 1e-5)),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(wanted.get("rope_theta", 10000.0))},
        "max_position_embeddings": int(target.get("max_position_embeddings", 4096)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        **{key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in target},
    }
    for key, value in wanted.items():
        if key in OWN and value != config[key]:
            raise RigctlError(f"recipe.draft says {key} {value!r}, the target has {config[key]!r}: leave the key out")
        if key in ("layer_types", "rope_scaling", "rope_parameters", "sliding_window", "model_type", "architectures"):
            raise RigctlError(f"recipe.draft has {key}: only full attention with plain RoPE is served right everywhere")
        if key != "rope_theta":
            config[key] = value
    return config
