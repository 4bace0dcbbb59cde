"""How each engine release takes an EAGLE-3 drafter: architectures, where it reads layer ids, what they mean.

Facts by reading the releases: vLLM gpu_model_runner.py `_get_eagle3_aux_layers_from_config` (0.16.0, 0.21.0,
0.23.0, 0.33.0); SGLang deepseek_v2.py `set_eagle3_layers_to_capture` and model_runner.py (0.5.9, 0.5.23).
By model card and thread: lightseekorg/kimi-k2.5-eagle3-mla (vLLM >= 0.18, SGLang >= 0.5.12), sglang#25673.

Ids are compared in one unit, the *input id*: k means the hidden state that goes into layer k, the one that
comes out of layer k - 1. Both engines capture at the entry of a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rigctl.contract.comparison import version_tuple
from rigctl.errors import RigctlError

KEY = "eagle_aux_hidden_state_layer_ids"
MHA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
SPECULATORS = ("Eagle3Speculator",)
Convention = Literal["input", "output", "engine-default", "unknown"]
MISMATCH = (
    "measured on Kimi-K2.5 with a K2 drafter: about 15 % of 5 drafted tokens accepted and 0.66x of the base "
    "throughput on vLLM 0.16, about 42 % on SGLang 0.5.9: measure it before you serve with it"
)
"""What a drafter of another target costs."""


@dataclass(frozen=True)
class Engine:
    """One engine release."""

    name: str
    version: str

    def __post_init__(self) -> None:
        if not version_tuple(self.version):
            raise RigctlError(f"{self.version!r} is not an engine version")

    def at_least(self, version: str) -> bool:
        return version_tuple(self.version) >= version_tuple(version)

    def reads(self, config: Mapping[str, Any]) -> tuple[list[int] | None, str]:
        """(ids as written, the key they were read from) by this release; None: it uses its default."""
        nested = config.get("eagle_config")
        nested_ids = nested.get(KEY) if isinstance(nested, Mapping) else None
        if self.name == "sglang":
            return (list(nested_ids), f"eagle_config.{KEY}") if nested_ids else (None, "")
        if config.get(KEY):
            return list(config[KEY]), KEY
        if nested_ids and self.at_least("0.23.0"):
            return list(nested_ids), f"eagle_config.{KEY}"
        return None, ""

    def captures(self, config: Mapping[str, Any], layers: int) -> tuple[list[int], str]:
        """(input ids that this release will capture, why)."""
        ids, key = self.reads(config)
        if ids is None:
            return default_ids(layers), "the engine's default, the config names none that it reads"
        if self.name == "sglang":
            return [layer + 1 for layer in ids], f"{key} {ids}, plus one"
        return ids, f"{key} {ids}, as they are"

    def wanted_keys(self, input_ids: Sequence[int]) -> dict[str, Any]:
        """The config keys that make this release capture `input_ids`."""
        if self.name == "sglang":
            return {"eagle_config": {KEY: [layer - 1 for layer in input_ids], "use_aux_hidden_state": True}}
        return {KEY: list(input_ids)}

    def overwrite_variable(self) -> str | None:
        """The variable that lets a drafter with a shorter context start."""
        return "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" if self.name == "sglang" else None


def default_ids(layers: int) -> list[int]:
    """Input ids both engines capture when none are given."""
    return [2, layers // 2, layers - 3]


def trained_input_ids(convention: Convention, ids: Sequence[int] | None, layers: int) -> list[int] | None:
    """What a drafter was trained on, as input ids; None if that is not known.

    `input`: id k is the input of layer k (vLLM; speculators >= 0.5). `output`: id k is the output of layer k
    (SpecForge, SGLang configs; speculators <= 0.4). `engine-default`: trained on what the engines default to.
    """
    if convention == "engine-default":
        return default_ids(layers)
    if convention == "unknown" or not ids:
        return None
    return [layer + 1 for layer in ids] if convention == "output" else list(ids)
