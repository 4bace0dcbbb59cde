"""Does a configuration fit on its cards: weights, drafter and KV cache, from configs and sizes. Pure.

Sizes are bytes on one GPU unless said otherwise. What an engine needs beside them (activations, graphs, NCCL's
buffers) is read off published runs of Kimi-K2.5; for another kind of model it is an estimate, and only what would not
fit without it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rig.catalog.entries import Configuration
from rig.catalog.kept_layers import CacheType
from rig.host.model_memory import Layers, Model, Share, Unaccounted

MIB = 1 << 20
# K2.5 at 0.94 of 97,887 MiB left 190,000 tokens of BF16 cache and 449,600 of FP8 (local-inference-lab/rtx6kpro
# models/kimi-k25.md): 7.1 and 4.7 GB went elsewhere. SGLang holds activations and graphs outside its fraction.
RESERVE = {"vllm": 8_000_000_000, "sglang": 1_500_000_000}
RUNNING = 1024
"""Requests that vLLM admits on cards of 70 GiB and more when nothing is said (0.33.0, engine/arg_utils.py)."""
BATCHED = 8192
"""Tokens of a batch that it then computes at once."""
BATCHES = 2
"""Batches under way: it schedules one while another is computed (0.26.0, config/vllm.py, max_in_flight_tokens)."""
CACHE_TYPES: Mapping[str, CacheType] = {
    **dict.fromkeys(("auto", "bfloat16", "float16", "bf16"), "bf16"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"), "fp8"),
    **dict.fromkeys(("nvfp4", "fp4_e2m1"), "nvfp4"),
}
"""Values of --kv-cache-dtype. Others keep scales of their own."""


@dataclass(frozen=True)
class Fit:
    """The account of one configuration on one of its GPUs."""

    name: str
    budget: int
    """Fraction times the card's memory."""
    weights: int
    drafter: int
    reserve: int
    request: int
    """Bytes of cache that one request of full length takes."""
    context: int
    """Tokens one request may have."""
    strict: bool = True
    """The engine refuses to start when one request of full length does not fit (vLLM); SGLang cuts requests short."""
    block: int = 0
    """Bytes of a block that holds one request's states in vLLM, which wants as many of them as it may run requests."""
    running: int = 0
    estimated: bool = False
    """The reserve is another model's: neither entry nor family says what this one leaves."""

    @property
    def for_cache(self) -> int:
        """Bytes left for the KV cache; negative when not even the weights fit."""
        return self.budget - self.weights - self.drafter - self.reserve

    @property
    def tokens(self) -> int:
        """Tokens the cache holds in requests of full length, as engines report it."""
        return max(0, self.for_cache * self.context // self.request)

    @property
    def states(self) -> int | None:
        """Requests whose states find room; None where no layer has any."""
        return max(0, self.for_cache // self.block) if self.block else None

    @property
    def fits(self) -> bool:
        """One request of full length finds room, and the states of all that may run."""
        return self.tokens >= self.context and (self.states is None or self.states >= self.running)

    @property
    def starts(self) -> bool:
        """The engine comes up, if only for shorter requests."""
        return self.fits or (self.tokens > 0 and not self.strict)

    @property
    def refused(self) -> bool:
        """The engine cannot come up, whatever activations and graphs take where that is an estimate."""
        return not (replace(self, reserve=0) if self.estimated else self).starts

    def __str__(self) -> str:
        parts = {"weights": self.weights, "drafter": self.drafter, "activations and graphs": self.reserve}
        account = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        lacking = self.states is not None and self.states < self.running
        states = f"; {self.running} requests need a state each, {self.states} find room" if lacking else ""
        return (
            f"of {self.budget / 1e9:.1f} GB a GPU {account}, which leaves {self.for_cache / 1e9:.1f} GB "
            f"= {self.tokens:,} tokens of cache; one request takes up to {self.context:,}{states}"
        )


def configuration_fit(
    name: str, configuration: Configuration, engine: str, budget: int, models: tuple[Model, Model | None]
) -> Fit:
    """The account of a catalogue entry. budget: bytes of a card times its memory fraction; models: target, drafter.

    Raises Unaccounted, which says what is missing.
    """
    target, drafter = models
    share = _share(configuration, engine)
    # A drafter's cache is in BF16, and whole on each rank of decode context parallelism.
    beside = Share(attention=share.attention, experts=share.attention)
    context = configuration.context_length or target.needed("max_position_embeddings")
    kept = target.layers(share)
    return Fit(
        name=name,
        budget=budget,
        weights=target.weights(share),
        drafter=drafter.weights(beside) if drafter else 0,
        reserve=RESERVE[engine] if configuration.memory_reserve is None else configuration.memory_reserve,
        request=target.request(context, share) + (drafter.request(context, beside) if drafter else 0),
        context=context,
        strict=engine == "vllm",
        block=_block(kept) if engine == "vllm" else 0,
        running=configuration.max_running_requests or RUNNING,
        estimated=configuration.memory_reserve is None,
    )


def _share(configuration: Configuration, engine: str) -> Share:
    flags, ranks, speculation = configuration.flags, configuration.tensor_parallel, configuration.speculation
    kind = str(flags.get("kv-cache-dtype", "auto"))
    if kind not in CACHE_TYPES:
        raise Unaccounted(f"the size of a cache of --kv-cache-dtype {kind} is not known")
    replicas = _whole(flags, "data-parallel-size", "dp-size")
    divided = flags.get("enable-dp-attention") is True
    if engine == "sglang" and ranks % replicas and divided:
        raise Unaccounted(f"--dp-size {replicas} does not divide {ranks} ranks")
    if engine == "vllm":
        attention, experts = ranks, ranks * replicas
    else:
        attention, experts = ranks // replicas if divided else ranks, ranks
    state = str(flags.get("mamba-ssm-cache-dtype", flags.get("mamba-ssm-dtype", "auto")))
    prefixes = flags.get("mamba-cache-mode") != "none" and flags.get("enable-prefix-caching") is not False
    return Share(
        attention=attention,
        experts=experts,
        pipeline=_whole(flags, "pipeline-parallel-size", "pp-size"),
        context=_whole(flags, "decode-context-parallel-size", "dcp-size"),
        cache=CACHE_TYPES[kind],
        packed=engine == "vllm" or flags.get("attention-backend") in (None, "dsa", "nsa"),
        all_indexed=engine == "sglang",
        windows=engine == "vllm",
        in_flight=BATCHES * _whole(flags, "max-num-batched-tokens", default=BATCHED),
        heads=speculation is not None and speculation.method == "mtp",
        steps=speculation.steps if speculation else 0,
        states=2 if engine == "vllm" and prefixes else 1,
        state_bytes={"float32": 4, "bfloat16": 2, "float16": 2}.get(state, 4 if engine == "sglang" else None),
    )


def _whole(flags: Mapping[str, Any], *names: str, default: int = 1) -> int:
    """A flag's whole number, by the name that is there."""
    name = next((one for one in names if one in flags), None)
    if name is None:
        return default
    text = str(flags[name])
    if not text.isdecimal() or not 0 < len(text) < 10 or not int(text):
        raise Unaccounted(f"--{name} is {text[:40]}, must be a positive whole number")
    return int(text)


def _block(kept: tuple[Layers, ...]) -> int:
    """vLLM cuts the cache into blocks of one size: as many layers as the rarer kind has, a state in each."""
    state = max((one.state for one in kept), default=0)
    others = sum(one.count for one in kept if not one.state)
    having = sum(one.count for one in kept if one.state)
    return state * (min(others, having) or having)
