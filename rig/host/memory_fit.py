"""Does a configuration fit on its cards: weights, drafter and KV cache, from configs and sizes. Pure.

Sizes are bytes on one GPU unless said otherwise. What an engine needs beside them (activations, graphs, NCCL's
buffers) is read off published runs, so a verdict near the edge is a warning and not a refusal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rig.catalog.entries import Configuration

MIB = 1 << 20
# K2.5 at 0.94 of 97,887 MiB left 190,000 tokens of BF16 cache and 449,600 of FP8 (local-inference-lab/rtx6kpro
# models/kimi-k25.md): 7.1 and 4.7 GB went elsewhere. SGLang holds activations and graphs outside its fraction.
RESERVE = {"vllm": 8_000_000_000, "sglang": 1_500_000_000}


@dataclass(frozen=True)
class Model:
    """A checkpoint as far as memory goes: its config.json (or the catalogue's shape) and bytes of all weight files."""

    config: Mapping[str, Any]
    total: int = 0

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    def number(self, name: str) -> int:
        """A whole number of the text config, 0 when it is absent or no such number."""
        value = self.text.get(name)
        return int(value) if isinstance(value, int | float) and 0 < value < 1 << 40 else 0

    @property
    def known(self) -> bool:
        """The config says what its cache takes."""
        return self.kv_per_token(1) > 0

    @property
    def latent(self) -> bool:
        """It has multi-head latent attention (MLA)."""
        return self.number("kv_lora_rank") > 0

    def weights(self, tensor_parallel: int) -> int:
        """Bytes of weights on each rank: down-projections of MLA and routers whole, all others divided."""
        whole = 0
        if self.latent:
            narrow = self.number("q_lora_rank") + self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
            rows = self.number("num_hidden_layers") * (narrow + self.number("n_routed_experts"))
            whole = 2 * self.number("hidden_size") * rows
        return whole + -(-(self.total - whole) // tensor_parallel)

    def kv_per_token(self, tensor_parallel: int, width: int = 2, context_parallel: int = 1) -> int:
        """KV cache of one token on one GPU, all layers. width: bytes of an element (2 BF16, 1 FP8).

        MLA keeps one latent vector that every rank needs whole; decode context parallelism divides the tokens.
        """
        layers = self.number("num_hidden_layers")
        if self.latent:
            per_layer = self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
            return -(-layers * per_layer * width // context_parallel)
        heads = self.number("num_key_value_heads") or self.number("num_attention_heads")
        head = self.number("head_dim") or self.number("hidden_size") // max(1, self.number("num_attention_heads"))
        return layers * 2 * -(-heads // tensor_parallel) * head * width


@dataclass(frozen=True)
class Fit:
    """The account of one configuration on one of its GPUs."""

    name: str
    budget: int
    """Fraction times the card's memory."""
    weights: int
    drafter: int
    reserve: int
    kv_per_token: int
    context: int
    """Tokens one request may have."""
    strict: bool = True
    """The engine refuses to start when one request of full length does not fit (vLLM); SGLang cuts requests short."""

    @property
    def for_cache(self) -> int:
        """Bytes left for the KV cache; negative when not even the weights fit."""
        return self.budget - self.weights - self.drafter - self.reserve

    @property
    def tokens(self) -> int:
        """Tokens the cache holds."""
        return max(0, self.for_cache // self.kv_per_token)

    @property
    def fits(self) -> bool:
        """One request of full length finds room."""
        return self.tokens >= self.context

    @property
    def starts(self) -> bool:
        """The engine comes up, if only for shorter requests."""
        return self.fits or (self.tokens > 0 and not self.strict)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "drafter": self.drafter, "activations and graphs": self.reserve}
        account = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        return (
            f"of {self.budget / 1e9:.1f} GB a GPU {account}, which leaves {self.for_cache / 1e9:.1f} GB "
            f"= {self.tokens:,} tokens of cache; one request takes up to {self.context:,}"
        )


def configuration_fit(
    name: str, configuration: Configuration, engine: str, budget: int, models: tuple[Model, Model | None]
) -> Fit:
    """The account of a catalogue entry. budget: bytes of a card times its memory fraction; models: target, drafter."""
    target, drafter = models
    ranks = configuration.tensor_parallel
    width = 1 if str(configuration.flags.get("kv-cache-dtype", "auto")).startswith("fp8") else 2
    split = int(str(configuration.flags.get("decode-context-parallel-size", 1)))
    return Fit(
        name=name,
        budget=budget,
        weights=target.weights(ranks),
        drafter=drafter.weights(ranks) if drafter else 0,
        reserve=RESERVE[engine],
        kv_per_token=target.kv_per_token(ranks, width, split) + (drafter.kv_per_token(ranks) if drafter else 0),
        context=configuration.context_length or target.number("max_position_embeddings"),
        strict=engine == "vllm",
    )
