"""The trainer on a real GPU, as the stages run it, on a machine without network, engine or systemd, thrown away.

python3 tests/gpu/train.py OUT [--steps tiny,real] [--cpu]

This Python has torch, transformers, pyarrow and safetensors; the rest of files/locks/speculators-*.txt lies on
PYTHONPATH. Two steps, each written to OUT/train.json at once:
tiny: the stock trainer (no CPU starter) learns the tiny target from states that its automaton gives; held-out
acceptance length >= 3.7, and OUT/tiny.tar holds the export, for SGLang to serve.
real: Kimi-K2.5's shapes with random states: tokens a second and memory. Nothing is learnt, no threshold.
--cpu: a rehearsal of both without a GPU: few rows, small shapes, the CPU starter, no threshold.
Exit code 0: every step did as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files/hostkit")]

from rigctl import builder
from rigctl.checkpoints import fit
from rigctl.contract.eagle3_conventions import Engine
from rigctl.contract.served_checkpoints import Training
from rigctl.contract.training_job import TrainingJob
from rigctl.tiny_models.checkpoints import checkpoint_files, publish
from rigctl.tiny_models.kimi import KIMI
from rigctl.training import export, prepare, states_check, train
from rigctl.training.place import Step, Workplace
from rigctl.training.progress import Progress
from rigctl.whole_files import write_json
from tests.support.tiny_training import conversations, digest, write_answers, write_states

STARTER = ROOT / "files/hostkit/rigctl/tiny_models/cpu/cpu_starter.py"
ENOUGH = 3.7
TINY_DRAFT = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
KIMI_DRAFT = {"head_dim": 128, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432}
"""Of the real step: 0.96 G trained numbers, the upper end of the published drafters."""
TORCH_ARGUMENTS = ["--loss-implementation", "eager"] if torch.__version__.startswith("2.11.") else []
"""The fused loss of speculators 0.9.0 does not compile there (seen on an H200)."""
RELEASES = (("vllm", "0.16.0"), ("vllm", "0.33.0"), ("sglang", "0.5.9"), ("sglang", "0.5.16"), ("sglang", "0.5.23"))


def order(root: Path, *, cpu: bool, target: Path, shape: dict[str, int], recipe: dict[str, Any]) -> TrainingJob:
    """A training of this machine. shape: hidden, layers, vocabulary."""
    url = "http://127.0.0.1:1"
    served = {"name": "none", "url": url, "model": "none", "private": True, "engine": "vllm", "version": "0.33.0"}
    prompts = {"path": "/none", "sha256": "0" * 64, "domain": "chat", "licence": "none", "provenance": "automaton"}
    layers = shape["layers"]
    return TrainingJob.model_validate(
        {
            "format": 1, "name": "gpu", "user": "root", "root": str(root), "target": "target",
            "target_path": str(target), **shape, "prompts": [prompts],
            "held_out": 0.1, "answers": {"served": served, "max_tokens": 512},
            "states": {
                "served": served, "layer_ids": [2, layers // 2, layers - 3, layers], "staging": str(root / "staging"),
                "disk_limit": 10**12,
            },
            "recipe": recipe,
            "trainer": {
                # bin/python of the interpreter that runs this.
                "environment_path": str(Path(sys.executable).parent.parent),
                "version": "0.9.0", "lock_sha256": "0" * 64,
                "gpus": [] if cpu else [0], "starter": str(STARTER) if cpu else None,
                "variables": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            },
            "ladder": [1], "tokens_a_row": 1, "rate": 1.0, "evaluation": {"engines": []},
            "publish": "none", "publish_path": "/none",
        }
    )  # fmt: skip


def tiny(work: Path, out: Path, *, cpu: bool) -> dict[str, Any]:
    """The chain prepare, states of the automaton, stock trainer, export, fit."""
    target, count = work / "target-wide", 24 if cpu else 60
    publish(checkpoint_files("target-wide"), target)
    recipe = {
        "epochs": 1 if cpu else 2, "learning_rate": 1e-3, "schedule": "none", "draft_vocabulary": 192,
        "sequence_length": 1024, "seed": 1,
        "draft": TINY_DRAFT, "arguments": [] if cpu else ["--num-workers", "0", *TORCH_ARGUMENTS],
    }  # fmt: skip
    job = order(
        work / "tiny", cpu=cpu, target=target, shape={"hidden": 256, "layers": 7, "vocabulary": 512}, recipe=recipe
    )
    rows = list(conversations(count))
    held = {f"chat-{count - 2}", f"tools-{count - 1}", f"chat-{count - 3}", f"chat-{count - 4}", f"chat-{count - 6}"}
    place = Workplace.of(job, Step("prepare", count))
    write_answers(
        place.answers,
        [one for one in rows if one["conversation"] not in held],
        [one for one in rows if one["conversation"] in held],
    )
    progress = Progress(place.root, place.step)
    prepare.run(job, place, progress)
    write_states(KIMI, place.states, prepare.rows(place), rows)
    started = time.monotonic()
    train.run(job, place, progress)
    took = time.monotonic() - started
    metrics = train.read_metrics(train.finished(place))
    export.run(job, place, progress)
    training = Training(convention="input", layer_ids=[2, 3, 4])
    verdicts = {
        f"{name} {version}": fit.check(target, place.export, Engine(name, version), 1024, training).word
        for name, version in RELEASES
    }
    with tarfile.open(out / "tiny.tar", "w") as archive:
        archive.add(place.export, "drafter-trained")
    found = train.length(metrics)
    good = cpu or (found >= ENOUGH and set(verdicts.values()) == {"fits"})
    return {
        "ok": good, "held_out_length": found, "positions": train.positions(metrics), "fit": verdicts,
        "seconds": round(took, 1),
        **speed(place.root / f"logs/train-{count}-0.log"),
    }  # fmt: skip


def real(work: Path, out: Path, *, cpu: bool) -> dict[str, Any]:
    """Kimi-K2.5's shapes, random states, a few steps at two lengths."""
    hidden, vocabulary, layers, draft_vocabulary = (256, 4096, 61, 1024) if cpu else (7168, 163840, 61, 32000)
    target = work / "shapes"
    random_target(target, hidden, vocabulary, layers, device="cpu" if cpu else "cuda")
    results: dict[str, Any] = {
        "ok": True,
        "hidden": hidden,
        "vocabulary": vocabulary,
        "draft_vocabulary": draft_vocabulary,
    }
    each, count = (64, 8) if cpu else (2048, 26)
    dice = np.random.default_rng(1)
    # Ids of a quarter of the vocabulary: frequencies differ, and the draft vocabulary is filled.
    rows = [dice.zipf(1.2, each) % vocabulary for _ in range(count)]
    answers = [
        {
            "conversation": f"c{number}",
            "domain": "chat",
            "input_ids": row.tolist(),
            "loss_mask": [0] * 8 + [1] * (each - 8),
        }
        for number, row in enumerate(rows)
    ]
    for length in (each, 2 * each) if cpu else (4096, 8192):
        recipe = {
            "epochs": 1, "learning_rate": 1e-4, "schedule": "none", "draft_vocabulary": draft_vocabulary,
            "sequence_length": length,
            "seed": 1, "draft": TINY_DRAFT if cpu else KIMI_DRAFT,
            "arguments": [] if cpu else ["--num-workers", "2", *TORCH_ARGUMENTS],
        }  # fmt: skip
        shape = {"hidden": hidden, "layers": layers, "vocabulary": vocabulary}
        job = order(work / f"real-{length}", cpu=cpu, target=target, shape=shape, recipe=recipe)
        place = Workplace.of(job, Step("prepare", count))
        write_answers(place.answers, answers[:-2], answers[-2:])
        progress = Progress(place.root, place.step)
        prepare.run(job, place, progress)
        place.states.mkdir(parents=True)
        random_states(place, {digest(row["input_ids"]): row["input_ids"] for row in answers}, hidden, cpu=cpu)
        log = place.root / f"logs/train-{count}-0.log"
        peak = Peak(cpu=cpu)
        started = time.monotonic()
        train.run(job, place, progress)
        results[f"sequence_{length}"] = {
            "seconds_with_start_and_checkpoint": round(time.monotonic() - started, 1),
            "peak_mib": peak.stop(), **speed(log),
        }  # fmt: skip
        results["trained_numbers"] = trained_numbers(place)
        export.run(job, place, progress)
        results["export_bytes"] = (place.export / "model.safetensors").stat().st_size
        write_json(out / "real.json", results)
    return results


def random_target(target: Path, hidden: int, vocabulary: int, layers: int, device: str) -> None:
    """What the trainer reads of a target: its config, a tokenizer, embedding, norm and head."""
    if (target / "model.safetensors").exists():
        return
    files = checkpoint_files("target-wide")
    target.mkdir(parents=True)
    for name, content in files.items():
        if not name.endswith(".safetensors"):
            (target / name).write_bytes(content)
    config = json.loads(files["config.json"])
    config["text_config"] |= {"hidden_size": hidden, "vocab_size": vocabulary, "num_hidden_layers": layers}
    (target / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    made = {
        f"language_model.{name}": (torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16) * 0.02).cpu()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(
        {**made, "language_model.model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)},
        target / "model.safetensors",
    )


def random_states(place: Workplace, tokens: dict[str, list[int]], hidden: int, *, cpu: bool) -> None:
    for number, said in enumerate(prepare.rows(place)):
        ids = torch.tensor(tokens[str(said["sha256"])])
        states = torch.randn(len(ids), 4, hidden, dtype=torch.bfloat16, device="cpu" if cpu else "cuda").cpu()
        path = place.states / f"hs_{number}.safetensors"
        save_file({states_check.STATES: states, states_check.TOKENS: ids}, path)
        states_check.check(path, layers=4, hidden=hidden, sha256=str(said["sha256"]))


def trained_numbers(place: Workplace) -> int:
    """Numbers in the checkpoint but for the embedding and the head, which are the target's."""
    found = train.headers.read(train.finished(place) / train.WEIGHTS)
    frozen = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    return sum(int(np.prod(one.shape)) for name, one in found.items() if name not in frozen)


def speed(log: Path) -> dict[str, Any]:
    """Tokens a second and memory as the trainer says them, of the steps after the first three (compilation)."""
    text = log.read_text(errors="replace")
    rates = [float(one) for one in re.findall(r"tokens_per_s=([\d.e+]+)", text)]
    memory = [float(one) for one in re.findall(r"memory_mb/opt=([\d.e+]+)", text)]
    warm = rates[3:] or rates
    return {
        "steps": len(rates), "tokens_per_s_median": round(statistics.median(warm), 1) if warm else None,
        "tokens_per_s_range": [round(min(warm), 1), round(max(warm), 1)] if warm else None,
        "allocated_after_step_mib": max(memory, default=None),
    }  # fmt: skip


class Peak:
    """The most memory of the card that was in use, in MiB, read twice a second."""

    def __init__(self, *, cpu: bool) -> None:
        self._most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if not cpu:
            self._thread.start()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._ended.wait(0.5):
            said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
            self._most = max([self._most, *(int(one) for one in said if one.isdigit())])

    def stop(self) -> int:
        self._ended.set()
        return self._most


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", default="tiny,real")
    parser.add_argument("--work", type=Path, default=Path("/tmp/kimi-rig-train"))
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    builder.unconfined()  # a machine that is thrown away
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[..., dict[str, Any]]] = {"tiny": tiny, "real": real}
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu" if arguments.cpu else torch.cuda.get_device_name(),
    }
    for name in arguments.steps.split(","):
        started = time.monotonic()
        try:
            report[name] = steps[name](arguments.work, arguments.out, cpu=arguments.cpu)
        except Exception:  # the next step still runs, as lent time is short; the report has the words
            report[name] = {"ok": False, "error": traceback.format_exc()[-4000:]}
        report[name]["step_seconds"] = round(time.monotonic() - started, 1)
        write_json(arguments.out / "train.json", report)
        print(json.dumps({name: report[name]}, indent=1), flush=True)
    return 0 if all(report[name]["ok"] for name in arguments.steps.split(",")) else 1


if __name__ == "__main__":
    sys.exit(main())
