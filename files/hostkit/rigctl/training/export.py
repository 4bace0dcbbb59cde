"""A checkpoint of speculators as a LlamaForCausalLMEagle3, which every engine release of the catalogue reads."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rigctl.checkpoints import headers
from rigctl.contract.eagle3_conventions import KEY, Engine
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training import portable, tensors, train
from rigctl.training.place import Workplace
from rigctl.training.progress import Progress
from rigctl.whole_files import read_json, write_json

DROPPED = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""The target's own rows, which the engines share."""
LAYER = (
    "input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight",
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
)  # fmt: skip
NEEDED = {"fc.weight", "norm.weight", "lm_head.weight", *(f"midlayer.{name}" for name in LAYER)}
MAPS = {"d2t", "t2d"}
"""Of a reduced vocabulary: both or none."""
COPIED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def run(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Export the best checkpoint of the rung's last part."""
    progress.tell(phase="export")
    source = train.finished(place.at(part=place.parts - 1 if place.step.rung else 0))
    if job.start:
        same_vocabulary(place.root / "converted", source)
    export(source, place.export, job.states.layer_ids[:-1])
    progress.tell(phase="exported", rows_done=1, rows=1, disk=(place.export / "model.safetensors").stat().st_size)


def same_vocabulary(start: Path, source: Path) -> None:
    """Raises RigctlError where a drafter has another vocabulary map than its start: output rows would mean other words.

    speculators 0.9.0 replaces the map of a start by one of the new data when it is given --draft-vocab-size.
    """
    before, after = (headers.read(one / train.WEIGHTS).get("d2t") for one in (start, source))
    if (before and tensors.data(before)) != (after and tensors.data(after)):
        raise RigctlError(
            f"{source} has another vocabulary map (d2t) than its start {start}: its output rows are the start's"
        )


def export(source: Path, destination: Path, layer_ids: list[int]) -> None:
    """Write the drafter. layer_ids: inputs that it was trained on. Raises RigctlError for one that is not portable."""
    config = read_json(source / "config.json", "config of the trained drafter")
    if not isinstance(config, dict):
        raise RigctlError(f"{source}/config.json is not a JSON object")
    found = headers.read(source / "model.safetensors")
    renamed = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in found.items() if name not in DROPPED
    }
    faults = portable.refusals(config)
    if missing := sorted(NEEDED - renamed.keys()):
        faults.append(f"tensors are missing: {', '.join(missing)}")
    if strange := sorted(renamed.keys() - NEEDED - MAPS):
        faults.append(f"tensors that no release reads: {', '.join(strange)}")
    if len(MAPS & renamed.keys()) == 1:
        faults.append("d2t and t2d belong together: one of them is missing")
    if (said := config.get(KEY)) not in (None, layer_ids):
        faults.append(f"trained on layer ids {said}, the order says {layer_ids}")
    if faults:
        raise RigctlError(f"{source} is not exported: {'; '.join(faults)}")
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors.copy(renamed, unfinished / "model.safetensors")
    write_json(unfinished / "config.json", flat(config, layer_ids, rows=renamed["lm_head.weight"].shape[0]))
    unfinished.chmod(0o755)
    shutil.rmtree(destination, ignore_errors=True)
    unfinished.rename(destination)


def flat(config: Mapping[str, Any], layer_ids: list[int], *, rows: int) -> dict[str, Any]:
    """config.json for the engines. rows: of lm_head, the draft vocabulary."""
    inner = portable.layer(config)
    rope = inner.get("rope_parameters") or {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: inner[key] for key in COPIED if key in inner},
        "rope_theta": rope.get("rope_theta", inner.get("rope_theta", 10000.0)),
        "draft_vocab_size": rows,
        "tie_word_embeddings": False,
        "torch_dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        # vLLM reads the first, SGLang the second, which counts outputs: both mean the same layers.
        **Engine("vllm", "0.33.0").wanted_keys(layer_ids),
        **Engine("sglang", "0.5.23").wanted_keys(layer_ids),
    }
