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
JOB = layout.training_unit(NAME)
ORDER = layout.training_path(NAME)
AT_WORK = {
    "answers": ("answers-", "rows_done"),
    "prepare": ("prepare-", "step"),
    "states": ("states-", "rows_done"),
    "train": ("train-40-", "loss"),
    "export": ("export-", "step"),
    "evaluate": ("evaluate-", "rows_done"),
}
"""Stage -> beginning of its step, and what its progress has once it is at work."""

# Every state of the tiny target is the embedding of its token, in each layer.
EQUAL = """
import json
from pathlib import Path
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


def wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.3)


def begun(box: TrainingBox, stage: str) -> None:
    """Start the job, and wait until this stage is at work."""
    box.ssh(f"rm -f {PLACE}/progress.json")
    box.rigctl(f"train start {NAME}")
    step, key = AT_WORK[stage]

    def at_work() -> bool:
        assert not over(box), words(box)
        told = json.loads(box.ssh(f"cat {PLACE}/progress.json", check=False).stdout or "{}")
        return bool(str(told.get("step")).startswith(step) and told[key])

    wait(at_work, 900)


def over(box: TrainingBox) -> bool:
    return box.ssh(f"systemctl is-active {JOB}", check=False).stdout.strip() in ("inactive", "failed")


def words(box: TrainingBox) -> str:
    """The last lines of the job."""
    return box.ssh(f"journalctl -o cat -n 30 _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {JOB})").stdout


def fails(box: TrainingBox, why: str) -> None:
    """The job ends, and its last lines say why."""
    wait(lambda: over(box), 900)
    assert why in words(box)
    assert box.ssh(f"systemctl is-failed {JOB}", check=False).stdout.strip() == "failed"


def killed(box: TrainingBox, stage: str) -> None:
    begun(box, stage)
    box.ssh(f"systemctl kill -s KILL 'kimi-job-builder-train-*' {JOB}")
    wait(lambda: over(box), 120)


def test_a_cut_thought_ends_it_with_its_reason(training_box: TrainingBox) -> None:
    """The order of a training that allows an answer eight tokens."""
    cut = f'sed -i \'s/"max_tokens": 512/"max_tokens": 8/\' {ORDER}'
    training_box.ssh(f"cp {ORDER} /root/order; {cut}; ! cmp -s {ORDER} /root/order")
    training_box.rigctl(f"train start {NAME}")
    fails(training_box, "A thought was cut: raise answers.max_tokens")
    training_box.ssh(f"mv /root/order {ORDER}")


def test_what_served_serves_again_after_a_kill(training_box: TrainingBox) -> None:
    training_box.ssh(f"systemctl start kimi-{BASE}")
    killed(training_box, "answers")
    active = f"systemctl is-active kimi-{BASE}"
    wait(lambda: training_box.ssh(active, check=False).stdout.strip() == "active", 300)
    training_box.ssh(f"systemctl stop kimi-{BASE}")


@pytest.mark.parametrize("stage", ["prepare", "states"])
def test_an_early_stage_that_is_killed_is_finished_by_the_next_run(training_box: TrainingBox, stage: str) -> None:
    killed(training_box, stage)


def test_an_engine_that_dies_in_extraction_ends_it_and_nothing_is_lost(training_box: TrainingBox) -> None:
    kept = f"ls {PLACE}/states/kept | wc -l"
    there = int(training_box.ssh(kept).stdout)
    begun(training_box, "states")
    training_box.ssh(f"systemctl kill -s KILL kimi-{STATES}")
    fails(training_box, "states-40-0: ")
    assert int(training_box.ssh(kept).stdout) >= there > 0


def test_a_full_disk_ends_it_with_its_reason(training_box: TrainingBox) -> None:
    place = f"{PLACE}/checkpoints"
    training_box.ssh(f"install -d -o kimi -g kimi {place}; mount -t tmpfs -o size=64k,mode=0777 tmpfs {place}")
    training_box.rigctl(f"train start {NAME}")
    try:
        fails(training_box, "No space left on device")
    finally:
        training_box.ssh(f"umount {place}")


@pytest.mark.parametrize("stage", ["train", "export", "evaluate"])
def test_a_late_stage_that_is_killed_is_finished_by_the_next_run(training_box: TrainingBox, stage: str) -> None:
    killed(training_box, stage)


def test_it_is_trained_and_published(training_box: TrainingBox, inventory: Path) -> None:
    begun = time.monotonic()
    done = training_box.train()
    took = time.monotonic() - begun
    assert done.returncode == 0, done.stdout + done.stderr
    receipt = json.loads((inventory / "trained" / f"{NAME}.json").read_text())
    seconds = {name: round(one["seconds"]) for name, one in receipt["steps"].items()}
    print(f"make train took {took:.0f} s after the kills; the last run of each step: {seconds}")
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
    words = ["rig", "bench", "run", training_box.inventory, "--configs", f"{BASE} {SERVED}", "--sweep", "sandbox"]
    done = training_box.run(*words, "--ledger", str(tmp_path), "--out", str(tmp_path), timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acceptance length" in training_box.run("rig", "bench", "list", "--ledger", str(tmp_path)).stdout
