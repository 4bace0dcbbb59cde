"""Files beside the tensors that every family has: tokenizer, chat template, how it generates."""

import json
from collections.abc import Mapping
from typing import Any

from rigctl.tiny_models.automaton import Automaton

MAX_POSITIONS = 4096

BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""Splits words from their punctuation, as real tokenizers do: the model's own words are read back as bytes."""
WHOLE_WORDS: dict[str, Any] = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": " ?[^ ]+| +"}, "behavior": "Isolated", "invert": False},
        {**BYTE_LEVEL, "use_regex": False},
    ],
}
"""Splits at blanks alone: the model's own words are read back as they were generated."""


def language_files(automaton: Automaton, chat_template: str, pre_tokenizer: Mapping[str, Any]) -> dict[str, bytes]:
    """What a family needs to be talked to."""
    bos, eos, pad = (automaton.special[name] for name in ("[BOS]", "[EOS]", "[PAD]"))
    generation = {
        "bos_token_id": bos,
        "eos_token_id": [automaton.special[automaton.end_of_turn], eos],
        "pad_token_id": pad,
        # Greedy by default: at temperature > 0 vLLM on CPU without Triton rejects good drafts (vllm#55005).
        "temperature": 0.0,
    }
    settings = {
        # Read by transformers 4 and 5 alike.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    return {
        "generation_config.json": as_json(generation),
        "tokenizer.json": as_json(_tokenizer(automaton, pre_tokenizer)),
        "tokenizer_config.json": as_json(settings),
        "chat_template.jinja": chat_template.encode(),
    }


def as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=True) + "\n").encode()


def _tokenizer(automaton: Automaton, pre_tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Byte-level BPE without merges: a known word is found whole, anything else falls apart into bytes."""
    added = automaton.added
    vocabulary = {token: number for token, number in automaton.token_ids.items() if token not in added}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(automaton, token) for token, _ in sorted(added.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _added_token(automaton: Automaton, token: str) -> dict[str, Any]:
    return {
        "id": automaton.added[token],
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token in automaton.special,
    }
