"""The stage `evaluate` with the stand-in engine: counters by conversation, speeds, a resumed run, an early death."""

import hashlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from rigctl import builder
from rigctl.contract.evaluation import Evaluation
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training import evaluate, train
from rigctl.training.place import Step, Workplace
from rigctl.training.progress import Progress
from tests import standin

ENGINE = str(Path(standin.__file__))
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def job(folder: Path, **evaluation: Any) -> TrainingJob:
    prompts = folder / "chat.jsonl"
    said = [{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(8)]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in said))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    served = {"name": "x", "url": url, "model": "m", "private": True, "engine": "vllm", "version": "0.33.0"}
    base = [sys.executable, ENGINE, "--port", str(port), "--model", "m"]
    engine = {
        "name": "vllm-x", "engine": "vllm", "version": "0.33.0", "release": "r", "url": url, "model": "m", "base": base,
        "drafting": [*base, "--faults", "{drafter}/faults"], "steps": 3,
    }  # fmt: skip
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    file = {"path": str(prompts), "sha256": digest, "domain": "chat", "licence": "x", "provenance": "x"}
    document = {
        "format": 1, "name": "t", "user": "root", "root": str(folder), "target": "k",
        "target_path": "/none", "hidden": 256, "layers": 7, "vocabulary": 512, "prompts": [file], "held_out": 0.25,
        "answers": {"served": served, "max_tokens": 64},
        "states": {"served": served, "layer_ids": [2, 3, 4, 7], "staging": "/none", "disk_limit": 1},
        "recipe": {"epochs": 1, "learning_rate": 1e-3, "draft_vocabulary": 8, "sequence_length": 64},
        "trainer": {"environment_path": "/none", "version": "0.9.0", "lock_sha256": "0" * 64, "gpus": []},
        "ladder": [0, 6], "tokens_a_row": 1, "rate": 1.0, "publish": "p", "publish_path": "/none",
        "evaluation": {"engines": [engine | evaluation.pop("engine", {})], "streams": [1, 2], **evaluation},
    }  # fmt: skip
    return TrainingJob.model_validate(document)


def trained(order: TrainingJob, shares: dict[int, float]) -> Workplace:
    """What the steps before have left."""
    place = Workplace.of(order, Step("evaluate"))
    place.answers.mkdir(parents=True)
    row = {"conversation": "c", "domain": "chat", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    (place.answers / "train.jsonl").write_text(json.dumps(row) + "\n")
    for rung, share in shares.items():
        at = place.at(rung=rung)
        at.export.mkdir(parents=True)
        (at.export / "faults").write_text(json.dumps({"accept": share}))
        if rung:
            kept = at.checkpoints / "0"
            kept.mkdir(parents=True)
            (kept / train.METRICS).write_text(json.dumps({"full_acc_0_epoch": 0.9, "full_acc_1_epoch": 0.5}))
    return place


@pytest.fixture(autouse=True)
def _unconfined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_confined", False)


def test_drafters_are_counted_once_and_what_is_there_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = job(tmp_path)
    place = trained(order, {0: 0.0, 6: 1.0})
    evaluate.run(order, place, Progress(place.root, place.step))
    text = (place.root / evaluate.FILE).read_text()
    found = Evaluation.parse(json.loads(text), evaluate.FILE)
    assert list(found.drafters) == ["rung-0", "rung-6"]
    untrained, best = (found.drafters[name].engines["vllm-x"] for name in found.drafters)
    assert untrained.length == 1.0 and best.length == 4.0
    assert found.drafters["rung-6"].offline_length == 2.4 and found.drafters["rung-0"].offline_length is None
    for engine in (untrained, best):
        assert len(engine.asked) == 2 and all(one.identical and one.drafts for one in engine.asked)
        assert [speed.streams for speed in engine.speeds] == [1, 2] and all(speed.base > 0 for speed in engine.speeds)
    assert any("they do not make one" in line for line in found.findings)
    # As after a kill between two pairs: what is kept is taken, the missing one is made.
    (place.evaluation / "vllm-x-rung-6.json").unlink()
    asked: list[Any] = []
    measure = evaluate.measure

    def noted(*given: Any) -> evaluate.Measured:
        asked.append(given[3])
        return measure(*given)

    monkeypatch.setattr(evaluate, "measure", noted)
    evaluate.run(order, place, Progress(place.root, place.step))
    assert asked == [place.at(rung=6).export]
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", int(order.evaluation.engines[0].url.rpartition(":")[2]))) != 0, (
            "it has ended"
        )


def test_an_engine_that_dies_at_its_start_says_so_with_its_last_words(tmp_path: Path) -> None:
    plan = json.dumps({"load": [["log", "no room for the cache"], ["exit", 3]]})
    order = job(tmp_path, engine={"base": [sys.executable, ENGINE, "--plan", plan]})
    place = trained(order, {0: 0.0, 6: 1.0})
    with pytest.raises(RigctlError, match="vllm-x ended with 3 at its start") as caught:
        evaluate.run(order, place, Progress(place.root, place.step))
    assert "no room for the cache" in str(caught.value)
    assert not (place.root / evaluate.FILE).exists()
