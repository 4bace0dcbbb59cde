"""A drafter of one's own, on a box, from clean: `make train` with the real engine and the real trainer.

In this order, on one box. Figures are of the engine's own counters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.catalog.entries import forget_catalogs, load_catalog
from rigctl.contract import layout
from tests.training.conftest import NAME, TrainingBox

STATES, BASE = "kimi-k2.5-states", "vllm-base"
SERVED = f"{BASE}-{NAME}"
OVERLAY = "sandbox-training.yaml"
PLACE = f"/data/training/{NAME}"
MINUTES = 15
"""On two idle cores, the deploy of the box left out."""
STAGES = ("answers", "states", "train", "export", "evaluate")

# Every state of the tiny target is the embedding of its token, in each layer.
EQUAL = """
import json, sys
from pathlib import Path
from safetensors import safe_open
import numpy as np
def raw(path, name):
    header = json.loads(Path(path).read_bytes()[8:8 + int.from_bytes(Path(path).read_bytes()[:8], "little")])
    begin, end = header[name]["data_offsets"]
    base = 8 + int.from_bytes(Path(path).read_bytes()[:8], "little")
    kind = {"BF16": np.uint16, "I64": np.int64, "I32": np.int32}[header[name]["dtype"]]
    return np.frombuffer(Path(path).read_bytes()[base + begin: base + end], kind).reshape(header[name]["shape"])
target = Path("/shared/kimi-k2.5-wide/model.safetensors")
embedding = raw(target, "language_model.model.embed_tokens.weight")
files = sorted(Path("PLACE/states").glob("*/*/hs_*.safetensors"))
for path in files:
    states, tokens = raw(path, "hidden_states"), raw(path, "token_ids")
    states = states.reshape(len(tokens), -1, embedding.shape[1])
    assert states.shape[1] == 4, states.shape
    for layer in range(4):
        assert (states[:, layer] == embedding[tokens]).all(), (path, layer)
print(len(files))
"""


@pytest.fixture(scope="session", autouse=True)
def deployed(training_box: TrainingBox) -> None:
    """A training needs a host as the catalogues say; its environments are not what is timed here."""
    done = training_box.deploy()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plan_says_what_it_takes_before_anything_is_started(training_box: TrainingBox) -> None:
    said = training_box.rigctl(f"train plan {NAME}")
    assert "2,048 bytes of states" in said
    assert "REFUSED" not in said
    assert training_box.ssh(f"systemctl is-active kimi-{STATES} kimi-{BASE}", check=False).stdout.split() == [
        "inactive",
        "inactive",
    ]


def test_nobody_else_reaches_the_extraction(training_box: TrainingBox) -> None:
    training_box.ssh(f"systemctl start kimi-{STATES}")
    started = json.loads(training_box.ssh(f"cat {layout.RUNTIME}/{STATES}/started.json").stdout)
    assert started["proved"]["speculation"]["drafts"] > 0
    assert started["proved"]["speculation"]["accepted"] == 0
    assert "refused" in training_box.ssh("curl -sS http://127.0.0.1:18000/v1/models", check=False).stderr.lower()
    assert "BELOW" not in training_box.rigctl("status")
    training_box.ssh(f"systemctl stop kimi-{STATES}")


def _killed(box: TrainingBox, stage: str) -> None:
    """Start the job, wait until a stage is at work, and kill all of it."""
    box.rigctl(f"train start {NAME}")
    wait(lambda: f'"step": "{stage}-' in box.ssh(f"cat {PLACE}/progress.json", check=False).stdout, 900)
    time.sleep(2)
    box.ssh("systemctl kill -s KILL 'kimi-job-builder-train-*' 'kimi-job-train-*'", check=False)
    wait(lambda: not box.ssh("systemctl is-active 'kimi-job-train-*'", check=False).stdout.strip(), 120)


def wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_killed_is_finished_by_the_next_run(training_box: TrainingBox, stage: str) -> None:
    if stage == "answers":
        training_box.ssh(f"systemctl start kimi-{BASE}")
    _killed(training_box, stage)
    # What served before a training serves again, however that ended.
    wait(lambda: training_box.ssh(f"systemctl is-active kimi-{BASE}", check=False).stdout.strip() == "active", 300)


def test_it_is_trained_and_published(training_box: TrainingBox, inventory: Path) -> None:
    begun = time.monotonic()
    done = training_box.train()
    took = time.monotonic() - begun
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"make train took {took:.0f} s after the kills")
    receipt = json.loads((inventory / "trained" / f"{NAME}.json").read_text())
    drafters = receipt["evaluation"]["drafters"]
    asked = {rung: one["engines"][BASE]["asked"] for one in drafters.values() for rung in [one["rung"]]}
    assert [sum(row[key] for row in asked[0]) > 0 for key in ("drafts", "accepted")] == [True, False], "untrained"
    chat = [row for row in asked[max(asked)] if row["domain"] == "chat"]
    assert sum(row["accepted"] for row in chat) >= 0.9 * 3 * sum(row["drafts"] for row in chat)
    assert 1 + sum(row["accepted"] for row in chat) / sum(row["drafts"] for row in chat) >= 3.7
    assert all(row["identical"] for rows in asked.values() for row in rows)
    assert receipt["training"]["layer_ids"] == [2, 3, 4]
    forget_catalogs()
    catalog = load_catalog(OVERLAY, inventory)
    assert catalog.checkpoints[NAME].training.convention == "input"
    assert catalog.serving[SERVED].drafter == NAME


def test_states_are_those_of_the_target(training_box: TrainingBox) -> None:
    script = EQUAL.replace("PLACE", PLACE)
    found = training_box.ssh(f"{layout.HOSTKIT}/current/venv/bin/python - <<'EOF'\n{script}\nEOF").stdout
    assert int(found) > 0


def test_a_second_run_does_nothing_twice(training_box: TrainingBox) -> None:
    before = training_box.ssh(f"cat {PLACE}/step-*.json | sha256sum").stdout
    done = training_box.train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert training_box.ssh(f"cat {PLACE}/step-*.json | sha256sum").stdout == before


def test_it_is_deployed_and_served_with_the_same_text(training_box: TrainingBox) -> None:
    path = Path(training_box.inventory)
    path.write_text(path.read_text().replace('["vllm-base"]', f'["vllm-base", "{SERVED}"]'))
    done = training_box.deploy()
    assert done.returncode == 0, done.stdout + done.stderr
    training_box.rigctl(f"switch {BASE}")
    plain = json.loads(training_box.rigctl("chat --json 'Who are you?'"))
    training_box.rigctl(f"switch {SERVED}")
    drafted = json.loads(training_box.rigctl("chat --json 'Who are you?'"))
    assert (drafted["content"], drafted["reasoning"]) == (plain["content"], plain["reasoning"])
    assert drafted["accepted"] >= 0.9 * drafted["drafted"]
    assert drafted["acceptance_length"] >= 3.7


def test_it_is_benchmarked(training_box: TrainingBox, tmp_path: Path) -> None:
    words = ["rig.cli.bench", "run", training_box.inventory, "--configs", f"{BASE} {SERVED}", "--sweep", "sandbox"]
    done = training_box.run(*words, "--ledger", str(tmp_path), "--out", str(tmp_path), timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acceptance length" in training_box.run("rig.cli.bench", "list", "--ledger", str(tmp_path)).stdout
