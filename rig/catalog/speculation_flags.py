"""The flags by which each engine speculates: method and engine in, flags out. Data, read off the engines' own sources.

vLLM 0.16.0 to 0.33.0: `--speculative-config` (config/speculative.py, SpeculativeConfig). SGLang 0.5.9 to 0.5.23:
`--speculative-*` (0.5.9 server_args.py `_handle_speculative_decoding`; 0.5.23 arg_groups/speculative_hook.py). Which of
the words a release knows is in files/releases/; its own parser is asked again before a unit is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rigctl.contract.speculation import Method

DRAFTER, STEPS, TOPK, VERIFIED, LAYERS = "{drafter}", "{steps}", "{topk}", "{verified}", "{layers}"
"""Stand for values of a configuration; `verified` are the drafted tokens and the bonus token."""


@dataclass(frozen=True)
class Flags:
    """One method on one engine."""

    word: str
    """The engine's own name of it."""
    flags: Mapping[str, Any]


def _vllm(word: str, **more: str) -> Flags:
    return Flags(word, {"speculative-config": {"method": word, **more, "num_speculative_tokens": STEPS}})


def _sglang(word: str, **more: str) -> Flags:
    return Flags(
        word, {"speculative-algorithm": word, **{name.replace("_", "-"): value for name, value in more.items()}}
    )


_CHAIN = {
    "speculative_num_steps": STEPS,
    "speculative_eagle_topk": TOPK,
    "speculative_num_draft_tokens": VERIFIED,
}

FLAGS: Mapping[tuple[str, Method], Flags] = {
    ("vllm", "eagle3"): _vllm("eagle3", model=DRAFTER),
    # Unknown to 0.17.1, known to 0.26.0.
    ("vllm", "dflash"): _vllm("dflash", model=DRAFTER),
    # A family's own word, such as glm4_moe_mtp, becomes mtp (SpeculativeConfig.__post_init__); the model is the target.
    ("vllm", "mtp"): _vllm("mtp"),
    # Known to 0.17.1; tried with 0.32.0. Its connector (`connector`) writes the states: both must be there.
    ("vllm", "extract_hidden_states"): Flags(
        "extract_hidden_states",
        {
            "speculative-config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
            }
        },
    ),
    # prompt_lookup_min and prompt_lookup_max are 5 unless `options` says otherwise.
    ("vllm", "ngram"): _vllm("ngram"),
    ("sglang", "eagle3"): _sglang("EAGLE3", speculative_draft_model_path=DRAFTER, **_CHAIN),
    # Its block is what one step verifies; steps and topk are forced to 1 (_handle_dflash). Unknown to 0.5.9.
    ("sglang", "dflash"): _sglang(
        "DFLASH", speculative_draft_model_path=DRAFTER, speculative_num_draft_tokens=VERIFIED
    ),
    # NEXTN is taken for EAGLE, and the target's own path for the drafter's where a model has such a head.
    ("sglang", "mtp"): _sglang("NEXTN", **_CHAIN),
    # topk becomes speculative-ngram-max-bfs-breadth. CUDA only.
    ("sglang", "ngram"): _sglang("NGRAM", speculative_num_draft_tokens=VERIFIED),
}


def connector(staging: str, options: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's --kv-transfer-config for hidden states. staging: directory that they are written to.

    options: further keys, such as another connector with its module.
    """
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": staging},
        **options,
    }


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """A template with the values in the places of their names."""
    if isinstance(template, Mapping):
        return {name: filled(value, values) for name, value in template.items()}
    return values.get(template, template)
