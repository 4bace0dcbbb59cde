"""A synthetic checkpoint: valid safetensors shards, index, tokenizer and code files; sizes as wanted."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

BLOCK = 1 << 20


def write_shard(place: Path, tensors: dict[str, int], noise: bytes) -> None:
    """A safetensors file of U8 tensors (name -> bytes) whose content differs by file and by MiB."""
    header, offset = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with place.open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        written = 0
        while written < offset:
            mark = hashlib.sha256(f"{place.name}:{written}".encode()).digest()
            block = mark + noise[len(mark) :]
            handle.write(block[: offset - written])
            written += len(block)


def make(root: Path, shards: int, shard_bytes: int) -> Path:
    """Write the checkpoint below `root` and return it."""
    root.mkdir(parents=True)
    noise = os.urandom(min(BLOCK, max(shard_bytes, 64)))
    weights = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:06d}.safetensors"
        half = shard_bytes // 2
        tensors = {f"layers.{number}.a": half, f"layers.{number}.b": shard_bytes - half}
        write_shard(root / name, tensors, noise)
        weights.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": shards * shard_bytes}, "weight_map": weights}
    texts = {
        "model.safetensors.index.json": json.dumps(index),
        "config.json": json.dumps({"auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}),
        "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_tiny.Tiny", None]}}),
        "generation_config.json": "{}",
        "configuration_tiny.py": "class TinyConfig: ...\n",
        "tokenization_tiny.py": "from .tool_declaration import render\n\n\nclass Tiny: ...\n",
        "tool_declaration.py": "def render() -> str:\n    return ''\n",
        "figures/logo.svg": "<svg/>",
        "README.md": "# tiny\n",
    }
    for name, text in texts.items():
        place = root / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
    (root / "tiktoken.model").write_bytes(b"IQ== 0\nIg== 1\n")
    return root
