"""Which releases serve a drafter as it was trained, option by option. A drafter that any of them would misread is
refused.

Read in the released wheels (docs/how-to/train-a-drafter.md says where): a release that does not know an option loads
the drafter all the same, and guesses worse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
"""config.json of a speculators checkpoint."""


@dataclass(frozen=True)
class Option:
    """One property of a drafter. used: whether this config has it. misread: releases that do not know it."""

    name: str
    used: Callable[[Config], bool]
    misread: tuple[str, ...]
    cure: str


def layer(config: Config) -> Config:
    """The decoder layer's part of the config."""
    inner = config.get("transformer_layer_config")
    return inner if isinstance(inner, Mapping) else {}


def _rope(config: Config) -> str:
    found = layer(config).get("rope_parameters") or layer(config).get("rope_scaling") or {}
    return str(found.get("rope_type") or found.get("type") or "default") if isinstance(found, Mapping) else repr(found)


def _slides(config: Config) -> bool:
    kinds = layer(config).get("layer_types") or []
    return any(kind != "full_attention" for kind in kinds) or (not kinds and bool(layer(config).get("sliding_window")))


EVERY = ("vLLM 0.16.0", "vLLM 0.33.0", "SGLang 0.5.16", "SGLang 0.5.23")
OPTIONS = (
    Option(
        "norm_before_residual",
        lambda config: bool(config.get("norm_before_residual")),
        ("SGLang 0.5.16", "SGLang 0.5.23"),
        "train with --no-norm-before-residual",
    ),
    Option(
        "norm_before_fc",
        lambda config: bool(config.get("norm_before_fc")),
        ("vLLM 0.16.0", "SGLang 0.5.16"),
        "train with --no-norm-before-fc",
    ),
    Option("fc_norm", lambda config: bool(config.get("fc_norm")), EVERY, "train without --fc-norm"),
    Option(
        "norm_output",
        lambda config: bool(config.get("norm_output")),
        ("vLLM 0.16.0",),
        "train with --no-norm-output",
    ),
    Option(
        "a sliding window",
        _slides,
        ("vLLM 0.16.0", "SGLang 0.5.16", "SGLang 0.5.23"),
        "train with a --draft-config of full attention",
    ),
    Option(
        "a scaled RoPE",
        lambda config: _rope(config) != "default",
        ("SGLang 0.5.16", "SGLang 0.5.23"),
        "train with a --draft-config of plain RoPE",
    ),
    Option(
        "another decoder than one Llama layer",
        lambda config: layer(config).get("model_type") != "llama" or layer(config).get("num_hidden_layers") != 1,
        EVERY,
        "train with a --draft-config of model_type llama and one layer",
    ),
    Option(
        "no head_dim of its own",
        lambda config: not layer(config).get("head_dim"),
        EVERY,
        "name head_dim in the --draft-config: it would get hidden_size / heads",
    ),
    Option(
        "a trained embedding",
        lambda config: bool(config.get("embed_requires_grad")),
        EVERY,
        "train without --embed-requires-grad: the engines share the target's embedding",
    ),
)


def refusals(config: Config) -> list[str]:
    """What keeps this drafter from being served as it was trained, each with the releases that would misread it."""
    return [
        f"the drafter has {option.name}, which {', '.join(option.misread)} would misread: {option.cure}"
        for option in OPTIONS
        if option.used(config)
    ]
