"""What a model takes on one GPU, by its config.json: weights, and what its layers keep for a request. Pure.

config.json is foreign: what cannot be computed from it raises Unaccounted, which says what is missing. Where it
misleads, the checkpoint's entry says what the layers keep (rig/catalog/kept_layers.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rig.catalog.kept_layers import CacheType, KeptLayers
from rigctl.contract.order import nearest

LIMIT = 1 << 40
INSTEAD = "write what its layers keep into its entry (memory: {cache: [...]}, docs/reference/memory.md)"
NEXT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Layers of an MTP head (vLLM 0.33.0, config/speculative.py)."""
KINDS = {
    **dict.fromkeys(("full_attention", "attention", "deepseek_sparse_attention", "chunked_attention", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "local_attention"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "M"), "state"),
    **dict.fromkeys(("moe", "mlp", "E", "-"), "nothing"),
}
"""Words of layer_types and layers_block_type, letters of hybrid_override_pattern, by what such a layer keeps. A chunk
is kept as the whole text would be, which is never too little."""
OWN_CACHES = ("compress_ratios", "sparse_attention_config", "linear_attn_config")
"""Keys of models whose caches are of a kind of their own (DeepSeek-V4, MiniMax-M3, Kimi-Linear)."""
STATES = ("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "ssm_state_size", "mamba_d_state")
NUMBERS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "index_topk", "index_head_dim", "index_n_heads"),
    *("index_topk_freq", "index_skip_topk_offset", "n_routed_experts", "num_experts", "num_local_experts"),
    *("moe_intermediate_size", "intermediate_size", "first_k_dense_replace", "vocab_size", "max_position_embeddings"),
    *("sliding_window", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim"),
    *("ssm_state_size", "n_groups", "conv_kernel", *NEXT_LAYERS),
)
WORDS = (
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "index_topk_pattern", "indexer_types"),
    *("expert_dtype", "mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
)
"""What an entry's `shape` has before config.json is there (make add-model)."""
INDEXER_BLOCK = 128
"""Elements of an FP8 index that share a scale of four bytes (vLLM 0.33.0, deepseek_v2.py)."""
NVFP4_BLOCK = 16


class Unaccounted(Exception):
    """No account can be made; the text says what is missing."""


@dataclass(frozen=True)
class Share:
    """How a model is divided among cards, and what its engine keeps. The defaults: one card, BF16, vLLM."""

    attention: int = 1
    """Ranks that divide attention layers."""
    experts: int = 1
    """Ranks that divide experts: more than `attention` with data parallelism."""
    pipeline: int = 1
    """Stages that divide the layers."""
    context: int = 1
    """Ranks that divide a request's tokens (decode context parallelism)."""
    cache: CacheType = "bf16"
    packed: bool = True
    """Sparse MLA in FP8 is kept in records with scales and a BF16 tail (`fp8_ds_mla`)."""
    all_indexed: bool = False
    """Layers that take another's index keep room for one of their own (SGLang)."""
    windows: bool = True
    """What leaves a window is freed (vLLM). SGLang's pool for windows is a share of the whole one."""
    in_flight: int = 0
    """Tokens that are computed at once, which a window holds beside its own."""
    heads: bool = False
    """The model drafts with its own head (MTP)."""
    steps: int = 0
    """Drafted tokens a step: each needs a state of its own."""
    states: int = 1
    """States of a request beside those of drafts; with prefix caching vLLM keeps a second one."""
    state_bytes: int | None = None
    """Bytes of a state's element; what config.json says when None."""


@dataclass(frozen=True)
class Layers:
    """Layers that keep the same on one GPU."""

    count: int
    record: int = 0
    """Bytes that one record takes in one layer."""
    per: int = 1
    window: int = 0
    """Tokens; 0: all are kept."""
    state: int = 0
    """Bytes of one layer whatever the length."""

    def request(self, tokens: int, share: Share) -> int:
        """Bytes that one request of so many tokens takes on one GPU, in all these layers."""
        if self.window and share.windows:
            held = min(tokens, self.window - 1 + share.in_flight)
        else:
            held = -(-tokens // share.context)
        return self.count * (self.state * (share.states + share.steps) + self.record * -(-held // self.per))


@dataclass(frozen=True)
class Model:
    """A checkpoint as far as memory goes: its config.json (or the catalogue's shape) and bytes of all weight files."""

    config: Any
    total: int = 0
    cache: Sequence[KeptLayers] = ()
    """What the checkpoint's entry says of its layers; it wins."""

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config, with what stands beside it."""
        if not isinstance(self.config, Mapping):
            raise Unaccounted("its config.json is not a JSON object")
        for name in ("text_config", "transformer_layer_config"):
            if (nested := self.config.get(name)) is not None:
                if not isinstance(nested, Mapping):
                    raise Unaccounted(f"{name} of its config.json is not a JSON object")
                return {**self.config, **nested}
        return self.config

    def number(self, name: str) -> int:
        """A whole number of the text config, 0 when it is absent or null."""
        value = self.text.get(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LIMIT or value % 1:
            raise Unaccounted(f"{name} of its config.json is {repr(value)[:40]}, no plausible whole number")
        return int(value)

    def needed(self, *names: str) -> int:
        """The first of these numbers that is there."""
        found = next((number for name in names if (number := self.number(name))), 0)
        if not found:
            raise Unaccounted(f"its config.json says no {' or '.join(names)}")
        return found

    @property
    def latent(self) -> bool:
        """It has multi-head latent attention (MLA)."""
        return self.number("kv_lora_rank") > 0

    def weights(self, share: Share) -> int:
        """Bytes of weights on the GPU that has most.

        Down-projections of MLA, indexers and routers are whole on each rank; all else is divided. A stage of a
        pipeline has its layers and one of the two tables of words.
        """
        if self.total <= 0:
            raise Unaccounted("the size of its weight files is not known")
        whole, edge = self._whole(), 0
        rest = max(0, self.total - whole)
        experts = self._experts() if share.experts != share.attention else 0
        if experts > rest:
            raise Unaccounted(
                f"its experts would take {experts:,} bytes of {self.total:,}: its quantisation is another"
            )
        if share.pipeline > 1:
            layers = self.needed("num_hidden_layers")
            edge = min(rest - experts, 2 * self.needed("vocab_size") * self.needed("hidden_size"))
            rest = max(experts, rest - 2 * edge)
            whole, rest, experts = (
                -(-size * -(-layers // share.pipeline) // layers) for size in (whole, rest, experts)
            )
        return whole - (-(rest - experts + edge) // share.attention) - (-experts // share.experts)

    def _whole(self) -> int:
        if not self.latent:
            return 0
        narrow = self.number("q_lora_rank") + self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
        layers, hidden = self.needed("num_hidden_layers"), self.number("hidden_size")
        heads, width = self.number("index_n_heads"), self.number("index_head_dim")
        index = heads * width * self.number("q_lora_rank") + hidden * (width + heads)
        rows = layers * (narrow + self.number("n_routed_experts"))
        return 2 * (hidden * rows + self._indexed(all_layers=False) * index)

    def _experts(self) -> int:
        """Bytes of all routed experts, by shapes and quantisation."""
        experts = self.needed("n_routed_experts", "num_experts", "num_local_experts")
        width = self.needed("moe_intermediate_size", "intermediate_size")
        layers = self.needed("num_hidden_layers") - self.number("first_k_dense_replace")
        return int(layers * experts * 3 * width * self.needed("hidden_size") * self._bits() / 8)

    def _bits(self) -> float:
        """Bits of an expert's weight, with its scales."""
        said = self.text.get("quantization_config")
        if said is None:
            return 16
        method = said.get("quant_method") if isinstance(said, Mapping) else None
        algorithm = said.get("quant_algo") if isinstance(said, Mapping) else None
        if self.text.get("expert_dtype") == "fp4" or method == "mxfp4":
            return 4.25
        if algorithm == "NVFP4":
            return 4.5
        if method == "fp8" or algorithm == "FP8":
            return 8
        raise Unaccounted(f"bytes of its experts: quantisation {method or algorithm or said!r:.40} is not known")

    def layers(self, share: Share) -> tuple[Layers, ...]:
        """What the layers of one stage keep on one GPU."""
        found = [*self._from_entry(share)] if self.cache else [*self._from_config(share)]
        if not found:
            raise Unaccounted(f"by its config.json no layer keeps anything: {INSTEAD}")
        return tuple(found)

    def request(self, tokens: int, share: Share) -> int:
        """Bytes that one request of so many tokens takes on one GPU."""
        return sum(one.request(tokens, share) for one in self.layers(share))

    def _from_entry(self, share: Share) -> Iterator[Layers]:
        for one in self.cache:
            record = self._by_heads(one.heads, one.head_dim, one.head_dim, share) if one.heads and one.head_dim else 0
            if not (one.heads or one.state):
                record = {"bf16": one.bf16, "fp8": one.fp8, "nvfp4": one.nvfp4}[share.cache] or 0
                if not record:
                    raise Unaccounted(f"its entry has no size of a record in a {share.cache} cache ({one.source})")
            state = -(-(one.state or 0) // share.attention)
            yield Layers(_stage(one.layers, share), record, one.per, one.window or 0, state)

    def _from_config(self, share: Share) -> Iterator[Layers]:
        kinds = self._kinds()
        heads = next((number for name in NEXT_LAYERS if (number := self.number(name))), 1) if share.heads else 0
        full, window, state = (_stage(kinds.count(kind), share) for kind in ("full", "window", "state"))
        if full + heads:
            yield Layers(full + heads, self._record(share))
        if indexed := _stage(self._indexed(all_layers=share.all_indexed), share):
            width = self.needed("index_head_dim")
            yield Layers(indexed + heads, width + 4 * -(-width // INDEXER_BLOCK))
        if window:
            yield Layers(window, self._record(share), window=self.needed("sliding_window"))
        if state:
            yield Layers(state, state=self._state(share))

    def _kinds(self) -> list[str]:
        """What each layer keeps: full, window, state or nothing."""
        count = self.needed("num_hidden_layers")
        if count > 10_000:
            raise Unaccounted(f"num_hidden_layers of its config.json is {count}, no plausible number")
        if owns := [key for key in OWN_CACHES if self.text.get(key)]:
            raise Unaccounted(f"{owns[0]} of its config.json means caches that are not computed from it: {INSTEAD}")
        for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            if (said := self.text.get(key)) is not None:
                return self._named(key, said, count)
        if every := self.number("full_attention_interval"):
            return ["full" if (number + 1) % every == 0 else "state" for number in range(count)]
        if (said := self.text.get("attn_type_list")) is not None:
            if isinstance(said, list) and len(said) == count and all(one == 1 for one in said):
                return ["full"] * count
            raise Unaccounted(f"attn_type_list of its config.json names layers that are no attention: {INSTEAD}")
        if having := [key for key in STATES if self.number(key)]:
            raise Unaccounted(f"its config.json has {having[0]} and does not say which layers keep a state: {INSTEAD}")
        return ["full"] * count

    def _named(self, key: str, said: Any, count: int) -> list[str]:
        if not isinstance(said, list | str) or len(said) != count:
            length = f"{len(said)} layers" if isinstance(said, list | str) else repr(said)[:40]
            raise Unaccounted(f"{key} of its config.json names {length}, num_hidden_layers is {count}")
        strange = next((one for one in said if not isinstance(one, str) or one not in KINDS), None)
        if strange is not None:
            like = nearest(strange, KINDS) if isinstance(strange, str) else ""
            raise Unaccounted(f"{key} of its config.json names {repr(strange)[:40]}, a kind not known{like}: {INSTEAD}")
        return [KINDS[one] for one in said]

    def _indexed(self, *, all_layers: bool) -> int:
        """Layers with an index of their own (sparse MLA): the others take the index of one before them."""
        if not self.number("index_topk"):
            return 0
        if not self.latent:
            raise Unaccounted(f"index_topk of its config.json without kv_lora_rank: {INSTEAD}")
        count = self.needed("num_hidden_layers")
        if all_layers:
            return count
        for key, full in (("indexer_types", "full"), ("index_topk_pattern", "F")):
            if (said := self.text.get(key)) is not None:
                if not isinstance(said, list | str) or len(said) != count:
                    raise Unaccounted(f"{key} of its config.json does not name {count} layers: it may be truncated")
                return [*said].count(full)
        every, offset = self.number("index_topk_freq") or 1, self.number("index_skip_topk_offset") or 2
        return sum(max(number - offset + 1, 0) % every == 0 for number in range(min(count, 10_000)))

    def _record(self, share: Share) -> int:
        """Bytes of one token in one layer of full attention."""
        if not self.latent:
            heads = self.number("num_key_value_heads") or self.needed("num_attention_heads")
            width = self.number("head_dim") or self.needed("hidden_size") // self.needed("num_attention_heads")
            return self._by_heads(heads, width, self.number("v_head_dim") or width, share)
        rank, rope = self.needed("kv_lora_rank"), self.number("qk_rope_head_dim")
        sparse = self.number("index_topk") > 0
        if share.cache == "nvfp4":
            # vLLM 0.33.0, flashmla_sparse.py (nvfp4_ds_mla), where it is for SM100 alone.
            raise Unaccounted("an FP4 cache of latent attention: there is no kernel for these cards")
        if share.cache == "fp8" and sparse and share.packed:
            return rank + 4 * -(-rank // INDEXER_BLOCK) + 2 * rope
        return (rank + rope) * (1 if share.cache == "fp8" else 2)

    def _by_heads(self, heads: int, keys: int, values: int, share: Share) -> int:
        """Bytes of one token: whole heads, which ranks beyond their number hold again."""
        local = -(-heads // share.attention)
        if share.context > 1 and share.attention // heads < share.context:
            raise Unaccounted(
                f"decode context parallelism over {share.context} with {heads} heads of keys on {share.attention} "
                f"ranks: vLLM takes {share.attention // heads} at most"
            )
        if share.cache == "nvfp4":
            return local * sum(width // 2 + width // NVFP4_BLOCK for width in (keys, values))
        return local * (keys + values) * (1 if share.cache == "fp8" else 2)

    def _state(self, share: Share) -> int:
        """Bytes of one layer's state: the last inputs of its convolution in BF16, and its matrix."""
        if value_heads := self.number("linear_num_value_heads"):
            key, value = self.needed("linear_key_head_dim"), self.needed("linear_value_head_dim")
            inputs = 2 * self.needed("linear_num_key_heads") * key + value_heads * value
            kernel, matrix = self.needed("linear_conv_kernel_dim"), value_heads * value * key
        else:
            heads, head = self.needed("mamba_num_heads"), self.needed("mamba_head_dim")
            size, groups = self.needed("ssm_state_size"), max(self.needed("n_groups"), share.attention)
            inputs, matrix, kernel = heads * head + 2 * groups * size, heads * head * size, self.needed("conv_kernel")
        said = self.text.get("mamba_ssm_cache_dtype") or self.text.get("mamba_ssm_dtype")
        width = share.state_bytes or (4 if said == "float32" else 2)
        return -(-2 * inputs * (kernel - 1 + share.steps) // share.attention) - (-matrix * width // share.attention)


def _stage(layers: int, share: Share) -> int:
    """Layers of the stage that has most."""
    return -(-layers // share.pipeline)
