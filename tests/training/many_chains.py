"""A ladder on the tiny model of many chains (`rigctl tiny-model topics`), against what coverage predicts.

python -m tests.training.many_chains WORK PYTHON [--rungs 5,8,20]

PYTHON is that of a trainer's environment on a CPU. States are the automaton's; trainer, validation and export are the
real ones. The predictions follow from fixed seeds: which topics the first N training conversations hold, how many of
the held-out ones ask for these. tests/fixtures/many_chains.json has them, and what was measured. Results go to
WORK/many_chains.json. Exit code 0: rungs rise, and each acceptance is within 5 points of its prediction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rigctl import builder
from rigctl.contract.training_job import TrainingJob
from rigctl.tiny_models.checkpoints import checkpoint_files, publish
from rigctl.tiny_models.kimi_topics import LENGTH, TOPICS, topic
from rigctl.training import export, prepare, train
from rigctl.training.place import Step, Workplace
from rigctl.training.progress import Progress
from tests.support.tiny_models import Prediction, predict_counters
from tests.support.tiny_training import topic_conversations, write_answers, write_states

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "files/hostkit/rigctl/tiny_models/cpu/cpu_starter.py"
TRAINING_SEED, HELD_OUT_SEED, HELD_OUT = 11, 12, 60
RUNGS = (5, 8, 20)
STEPS = 3
TURNS = 10
"""Of a training conversation, all about one topic: so many answers a topic are learnt from."""
NEAR = 0.05
ANSWER = LENGTH + 1
"""Tokens of an answer, the end of the turn among them."""
DRAFT = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}


def covered(rung: int) -> set[int]:
    """Topics that the first so many training conversations are about."""
    return {row["topic"] for row in topic_conversations(rung, TRAINING_SEED)}


def coverage(rung: int) -> float:
    """Share of the held-out conversations that ask for one of these."""
    known = covered(rung)
    asked = [row["topic"] for row in topic_conversations(HELD_OUT, HELD_OUT_SEED)]
    return sum(one in known for one in asked) / len(asked)


def predicted(rung: int) -> list[float]:
    """Share of held-out tokens that are right at each position and all before it, as the trainer's validation counts.

    A covered answer is right throughout. At later positions its first tokens have no draft that begins within the
    answer, and count as wrong (speculators 0.9.0, models/eagle3/metrics.py: a step is masked by its targets).
    """
    return [coverage(rung) * (ANSWER - position) / ANSWER for position in range(STEPS)]


def counters(rung: int) -> Prediction:
    """The engine's counters over the held-out prompts, one after another, 3 drafted tokens."""
    known = covered(rung)
    # Nothing leads to the token that ends a prompt: a proposal that is never right.
    wrong = dict.fromkeys(TOPICS.following, topic(0))
    right = {**TOPICS.following, TOPICS.end_of_turn: topic(0)}
    asked = [row["topic"] for row in topic_conversations(HELD_OUT, HELD_OUT_SEED)]
    found = [predict_counters(TOPICS, topic(one), right if one in known else wrong, STEPS) for one in asked]
    return Prediction(
        sum(one.drafts for one in found),
        sum(one.draft_tokens for one in found),
        sum(one.accepted for one in found),
        tuple(sum(one.accepted_per_position[position] for one in found) for position in range(STEPS)),
        sum(one.output_tokens for one in found),
    )


def order(work: Path, target: Path, python: Path, rungs: Sequence[int]) -> TrainingJob:
    """The training."""
    url = "http://127.0.0.1:1"
    served = {"name": "none", "url": url, "model": "none", "private": True, "engine": "vllm", "version": "0.32.0"}
    prompts = {"path": "/none", "sha256": "0" * 64, "domain": "chat", "licence": "none", "provenance": "automaton"}
    return TrainingJob.model_validate(
        {
            "format": 1, "name": "topics", "user": "root", "root": str(work), "target": "topics",
            "target_path": str(target), "hidden": 256, "layers": 7, "vocabulary": 512, "prompts": [prompts],
            "held_out": 0.5,
            "answers": {"served": served, "max_tokens": 64},
            "states": {"served": served, "layer_ids": [2, 3, 4, 7], "staging": str(work), "disk_limit": 10**9},
            "recipe": {
                "epochs": 8, "learning_rate": 2e-3, "schedule": "linear", "draft_vocabulary": 256,
                "sequence_length": 512, "seed": 1, "draft": DRAFT,
            },
            "trainer": {
                "environment_path": str(python.parent.parent), "version": "0.9.0", "lock_sha256": "0" * 64, "gpus": [],
                "starter": str(STARTER),
            },
            "ladder": list(rungs), "tokens_a_row": 1, "rate": 1.0, "evaluation": {"engines": []}, "publish": "none",
            "publish_path": "/none",
        }
    )  # fmt: skip


def climb(job: TrainingJob, rung: int) -> dict[str, Any]:
    """Train one rung: what the trainer's validation says of the held-out conversations."""
    place = Workplace.of(job, Step("train", rung))
    held_out = list(topic_conversations(HELD_OUT, HELD_OUT_SEED))
    rows = list(topic_conversations(rung, TRAINING_SEED, TURNS))
    write_answers(place.answers, rows, held_out)
    progress = Progress(place.root, place.step)
    prepare.run(job, place, progress)
    write_states(TOPICS, place.states, prepare.rows(place), [*rows, *held_out])
    train.run(job, place, progress)
    export.run(job, place, progress)
    metrics = train.read_metrics(train.finished(place))
    return {"predicted": predicted(rung), "measured": train.positions(metrics), "offline_length": train.length(metrics)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--rungs", default=",".join(map(str, RUNGS)))
    arguments = parser.parse_args()
    builder.unconfined()  # a maintainer's machine
    rungs = [int(one) for one in arguments.rungs.split(",")]
    target = arguments.work / "target"
    arguments.work.mkdir(parents=True, exist_ok=True)
    publish(checkpoint_files("topics"), target)
    results = {}
    for rung in rungs:
        results[rung] = climb(order(arguments.work, target, arguments.python, rungs), rung)
        print(json.dumps({rung: results[rung]}), flush=True)
        (arguments.work / "many_chains.json").write_text(json.dumps(results, indent=1) + "\n")
    first = [results[rung]["measured"][0] for rung in rungs]
    pairs = [pair for one in results.values() for pair in zip(one["measured"], one["predicted"], strict=True)]
    near = all(abs(measured - expected) <= NEAR for measured, expected in pairs)
    return 0 if near and all(fewer < more for fewer, more in itertools.pairwise(first)) else 1


if __name__ == "__main__":
    sys.exit(main())
