"""A checkpoint whose loading takes as long as its size asks for: Kimi-K2.5's layer shapes, few layers, random weights.

python3 tests/gpu/large.py FOLDER GB [--device cuda]

What is multiplied by zero in the tiny target is here too, so it answers what the tiny one answers. Needs torch. In
bf16; the real one's experts are INT4, a quarter of the bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files/hostkit")]

from rigctl.tiny_models import kimi_files, numbers
from rigctl.tiny_models import kimi_target as target
from rigctl.tiny_models.kimi import KIMI

HIDDEN, INTERMEDIATE, LAYERS = 7168, 18432, 2
EXPERT_GB = 3 * HIDDEN * 2048 * 2 / 1e9
SHARD_BYTES = 5 * 10**9


def shape(gigabytes: float) -> target.Shape:
    """Kimi-K2.5's, with as many experts as the size has room for beside the rest (about 1.7 GB)."""
    experts = max(8, round((gigabytes - 1.7) / EXPERT_GB) // 8 * 8)
    return target.Shape(64, experts, INTERMEDIATE, 2048, 1536, 512, 128, 64, 128)


def config(made: target.Shape) -> dict[str, Any]:
    """The tiny target's, with these sizes."""
    content: dict[str, Any] = json.loads(kimi_files.target_files(made)["config.json"])
    content["text_config"] |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts_per_tok": 8}
    content["vision_config"]["text_hidden_size"] = HIDDEN
    return content


def tensors(made: target.Shape, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values, a tensor at a time."""

    def noise(*size: int) -> torch.Tensor:
        return (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def wide(values: numbers.Array) -> torch.Tensor:
        result = zeros(len(values), HIDDEN)
        result[:, : numbers.HIDDEN] = torch.from_numpy(values)
        return result

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.gate_proj.weight", noise(width, HIDDEN)
        yield f"{prefix}.up_proj.weight", noise(width, HIDDEN)
        yield f"{prefix}.down_proj.weight", zeros(HIDDEN, width)

    heads = made.heads
    yield "model.embed_tokens.weight", wide(numbers.embedding(KIMI))
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", ones(HIDDEN)
        yield f"{name}.post_attention_layernorm.weight", ones(HIDDEN)
        yield f"{name}.self_attn.q_a_proj.weight", noise(made.q_rank, HIDDEN)
        yield f"{name}.self_attn.q_a_layernorm.weight", ones(made.q_rank)
        yield f"{name}.self_attn.q_b_proj.weight", noise(heads * (made.nope_dim + made.rope_dim), made.q_rank)
        yield f"{name}.self_attn.kv_a_proj_with_mqa.weight", noise(made.kv_rank + made.rope_dim, HIDDEN)
        yield f"{name}.self_attn.kv_a_layernorm.weight", ones(made.kv_rank)
        yield f"{name}.self_attn.kv_b_proj.weight", noise(heads * (made.nope_dim + made.v_dim), made.kv_rank)
        yield f"{name}.self_attn.o_proj.weight", zeros(HIDDEN, heads * made.v_dim)
        if layer < target.DENSE_LAYERS:
            yield from mlp(f"{name}.mlp", made.intermediate)
            continue
        yield f"{name}.mlp.gate.weight", noise(made.routed_experts, HIDDEN)
        yield f"{name}.mlp.gate.e_score_correction_bias", zeros(made.routed_experts)
        for expert in range(made.routed_experts):
            yield from mlp(f"{name}.mlp.experts.{expert}", made.moe_intermediate)
        yield from mlp(f"{name}.mlp.shared_experts", made.moe_intermediate * target.SHARED_EXPERTS)
    yield "model.norm.weight", ones(HIDDEN)
    yield "lm_head.weight", wide(numbers.right_head(KIMI))


def write(folder: Path, gigabytes: float, device: str) -> None:
    """All files of the checkpoint."""
    made = shape(gigabytes)
    folder.mkdir(parents=True, exist_ok=True)
    files = kimi_files.target_files(made) | kimi_files.processor_files()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config(made), indent=2))
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = count = total = 0

    def flush() -> None:
        nonlocal shard, size, count, total
        count += 1
        name = f"model-{count:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
        index.update(dict.fromkeys(shard, name))
        total += size
        shard, size = {}, 0

    for name, values in tensors(made, device):
        shard[f"language_model.{name}"] = values
        size += values.nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    listed = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    print(f"{folder}: {total / 1e9:.1f} GB in {count} files, {made.routed_experts} experts")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.gigabytes, arguments.device)


if __name__ == "__main__":
    main()
