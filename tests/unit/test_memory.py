"""Memory fit against what was published of Kimi-K2.5 on eight 96 GB cards."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rig.catalog.entries import load_catalog
from rig.host.memory_fit import MIB, configuration_fit
from rig.host.model_memory import Model, Share, Unaccounted

# moonshotai/Kimi-K2.5 config.json, text_config.
CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 384, "max_position_embeddings": 262144,
    },
}  # fmt: skip
# A Llama-style EAGLE-3 drafter of AQ-MedAI's kind: one layer, target's width.
DRAFTER = {
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
}
CARD = 97887 * MIB
WIDTHS = {"BF16": 2, "I32": 4}
# Tensors that every rank holds whole: norms, the down-projections of MLA, routers (vLLM's ReplicatedLinear in
# deepseek_v2.py).
REPLICATED = re.compile(r"norm|q_a_proj|kv_a_proj|\.gate\.")


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def matrix(name: str, rows: int, columns: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, dtype, (rows, columns))


def packed(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """INT4 in groups of 32 as compressed-tensors writes it: eight values an I32, one BF16 scale a group."""
    yield matrix(f"{name}.weight_packed", rows, columns // 8, "I32")
    yield matrix(f"{name}.weight_scale", rows, columns // 32)


def kimi() -> Iterator[Tensor]:
    """Shapes of the language model."""
    yield matrix("language_model.model.embed_tokens.weight", 163840, 7168)
    yield matrix("language_model.lm_head.weight", 163840, 7168)
    for layer in range(61):
        at = f"language_model.model.layers.{layer}"
        yield matrix(f"{at}.self_attn.q_a_proj.weight", 1536, 7168)
        yield matrix(f"{at}.self_attn.q_b_proj.weight", 64 * 192, 1536)
        yield matrix(f"{at}.self_attn.kv_a_proj_with_mqa.weight", 576, 7168)
        yield matrix(f"{at}.self_attn.kv_b_proj.weight", 64 * 256, 512)
        yield matrix(f"{at}.self_attn.o_proj.weight", 7168, 64 * 128)
        yield Tensor(f"{at}.input_layernorm.weight", "BF16", (7168,))
        if layer == 0:
            yield matrix(f"{at}.mlp.gate_up_down", 3 * 18432, 7168)
            continue
        yield matrix(f"{at}.mlp.gate.weight", 384, 7168)
        yield matrix(f"{at}.mlp.shared_experts.gate_up_down", 3 * 2048, 7168)
        yield from packed(f"{at}.mlp.experts.gate_up_down", 384 * 3 * 2048, 7168)


HEADERS = tuple(kimi())
EIGHT = Share(attention=8, experts=8)
KIMI = Model(CONFIG, total=sum(one.size for one in HEADERS))


def test_shapes_add_up_to_the_published_size() -> None:
    # 595.2 GB with the vision tower (0xSero/local-ai-registry, by the hub's records).
    assert KIMI.total == pytest.approx(595.2e9, rel=0.005)


def test_from_headers_and_from_the_manifests_total_agree() -> None:
    from_headers = sum(one.size if REPLICATED.search(one.name) else -(-one.size // 8) for one in HEADERS)
    assert 74.4e9 < from_headers < 77e9
    assert KIMI.weights(EIGHT) == pytest.approx(from_headers, rel=0.002)


def test_cache_of_a_token() -> None:
    assert KIMI.request(1, EIGHT) == 61 * 576 * 2
    assert KIMI.request(8, Share(attention=8, cache="fp8", context=8)) == 61 * 576
    assert Model(DRAFTER).request(1, EIGHT) == 2 * 8 * 128 * 2
    # Two heads on eight ranks: each rank holds one of them, whole.
    assert Model({**DRAFTER, "num_key_value_heads": 2}).request(1, EIGHT) == 2 * 128 * 2
    # What speculators writes stands one level deeper.
    assert Model({"transformer_layer_config": DRAFTER}).request(1, EIGHT) == 2 * 8 * 128 * 2


@pytest.mark.parametrize(("flags", "published"), [({}, 190_000), ({"kv-cache-dtype": "fp8"}, 449_600)])
def test_tokens_of_cache_are_near_the_published_and_not_above(flags: dict[str, str], published: int) -> None:
    # local-inference-lab/rtx6kpro models/kimi-k25.md, fraction 0.94.
    entry = load_catalog().serving["vllm-base"].model_copy(update={"flags": flags})
    fit = configuration_fit("vllm-base", entry, "vllm", int(0.94 * CARD), (KIMI, None))
    assert 0.75 * published < fit.tokens <= published


@pytest.mark.parametrize("name", ["vllm-base", "vllm-eagle3-custom", "sglang-base", "sglang-eagle3-aq-medai"])
def test_the_february_configurations_fit(name: str) -> None:
    catalog = load_catalog()
    entry = catalog.serving[name]
    drafter = Model(DRAFTER, total=4_000_000_000) if entry.speculation else None
    engine = catalog.releases[entry.release].engine
    fit = configuration_fit(name, entry, engine, int((entry.fraction or 0) * CARD), (KIMI, drafter))
    assert fit.starts, fit
    assert "weights 7" in str(fit)
    # SGLang's entries name no context length, and the model's own does not fit: it starts and cuts requests short.
    assert fit.fits is (engine == "vllm")
    assert fit.context == (32768 if engine == "vllm" else 262144)


def test_too_long_a_context_does_not_fit() -> None:
    entry = load_catalog().serving["vllm-base"].model_copy(update={"context_length": 262144})
    fit = configuration_fit("long", entry, "vllm", int(0.95 * CARD), (KIMI, None))
    assert not fit.fits
    assert "one request takes up to 262,144" in str(fit)
    entry = entry.model_copy(update={"tensor_parallel": 4})
    assert configuration_fit("tp4", entry, "vllm", int(0.95 * CARD), (KIMI, None)).tokens == 0


NAMES = st.sampled_from(["text_config", *CONFIG["text_config"], "num_key_value_heads", "head_dim"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.none(), max_size=1)


@given(st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES)))
def test_an_odd_config_is_unknown_and_never_a_traceback(config: dict[str, Any]) -> None:
    """A host may hold any config.json."""
    model = Model(config, total=10**12)
    entry = load_catalog().serving["vllm-base"]
    with contextlib.suppress(Unaccounted):
        assert configuration_fit("x", entry, "vllm", 90 * 10**9, (model, model)).request > 0


def test_a_config_that_says_nothing_of_its_cache_has_no_account() -> None:
    with pytest.raises(Unaccounted, match=r"num_hidden_layers of its config\.json is '61'"):
        Model({"text_config": {"num_hidden_layers": "61", "kv_lora_rank": 512}}).request(1, EIGHT)
