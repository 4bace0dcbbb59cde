"""The target as speculators reads it: the text model of a multimodal checkpoint, its tokenizer, links to its weights.

`prepare-data` and `train` load a processor and a config by the model's path: of a kimi_k25 config they want an image
processor, and a model type that transformers does not know is refused without the checkpoint's own code.
"""

import json
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError
from rigctl.whole_files import read_json, write_json

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
    "tokenization_kimi.py", "tool_declaration_ts.py",
)  # fmt: skip
"""Files of a tokenizer; a checkpoint has some of them. The last two are Kimi-K2.5's own code for tiktoken.model."""
KNOWN_AS = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}
"""Model types that transformers has under another name: the same layers."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text part of a target's config.json, under a model type that transformers knows, without remote code."""
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, dict) else dict(config)
    kind = text.get("model_type")
    text["model_type"] = KNOWN_AS.get(str(kind), kind)
    text.pop("auto_map", None)
    # The trainer loads embedding, norm and head alone, which are never packed.
    text.pop("quantization_config", None)
    return text


def write(target: Path, view: Path) -> None:
    """Make or renew the view. Raises RigctlError where the target has no config or no weights."""
    config = read_json(target / "config.json", "config of the target")
    if not isinstance(config, dict):
        raise RigctlError(f"{target}/config.json is not a JSON object")
    shards = sorted(target.glob("*.safetensors"))
    if not shards:
        raise RigctlError(f"{target} has no safetensors file: is the target staged?")
    links = [*shards, *target.glob("model.safetensors.index.json"), *(target / name for name in TOKENIZER)]
    view.mkdir(parents=True, exist_ok=True)
    for source in links:
        if source.exists():
            _link(view / source.name, source)
    tokenizer = view / "tokenizer_config.json"
    if tokenizer.exists():
        _without_remote_code(tokenizer)
    write_json(view / "config.json", text_config(config))


def _link(place: Path, source: Path) -> None:
    if place.is_symlink() and place.readlink() == source:
        return
    place.unlink(missing_ok=True)
    place.symlink_to(source)


def _without_remote_code(tokenizer: Path) -> None:
    """A tokenizer that lies whole in tokenizer.json needs no code of the checkpoint's: `regenerate-responses` runs
    none."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    if (tokenizer.parent / "tokenizer.json").exists() and content.pop("auto_map", None):
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer.unlink()
        write_json(tokenizer, content)
