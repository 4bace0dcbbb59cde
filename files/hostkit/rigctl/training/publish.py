"""A trained drafter becomes a checkpoint: whole, root's, with a receipt of all that it was made from."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rigctl import builder
from rigctl.checkpoints.fit import check
from rigctl.contract.eagle3_conventions import Engine
from rigctl.contract.evaluation import Evaluation
from rigctl.contract.happened import Happened, record_text
from rigctl.contract.served_checkpoints import Training
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.reached import reached
from rigctl.training import runs, step
from rigctl.training.place import Step

RECEIPT, EVALUATION = "receipt.json", "evaluation.json"
FILES = ("config.json", "model.safetensors")
"""Of an export: nothing else is published, and no code."""
RECORD_BYTES = 16 << 20


class Receipt(Happened):
    """Of a receipt what is asked again."""

    FILE = RECEIPT

    files: dict[str, str]
    at: int


def published(job: TrainingJob) -> dict[str, Any] | None:
    """Digests of what was published last, and when."""
    found = Receipt.known(runs.state(job))
    return found.model_dump() if found else None


def evaluated(job: TrainingJob) -> Evaluation:
    """Every count of the last evaluation. Raises RigctlError where there is none, or it cannot be used."""
    try:
        return Evaluation.parse_text(
            Place(job.directory).read(EVALUATION, RECORD_BYTES), f"{job.directory}/{EVALUATION}"
        )
    except OSError as error:
        raise RigctlError(f"{job.name} is not evaluated ({error.strerror}): `rigctl train start {job.name}`") from None


def better(job: TrainingJob) -> tuple[float, float]:
    """(length of the new drafter, of its start), of both the least in any engine. Raises RigctlError without a gain."""
    found = evaluated(job).drafters
    lengths = {name: min(one.length for one in of.engines.values()) for name, of in found.items() if of.engines}
    by_rung = {of.rung: lengths[name] for name, of in found.items() if name in lengths}
    new = by_rung.get(job.ladder[-1])
    # A drafter that is not there yet drafts nothing: one token a step.
    before = by_rung.get(0) or lengths.get(job.start.name if job.start else "") or 1.0
    if new is None:
        raise RigctlError(f"{job.directory}/{EVALUATION} has no figures of rung {job.ladder[-1]}: evaluate again")
    if new <= before:
        raise RigctlError(
            f"{job.publish} is no better than what it began from: acceptance length {new:.2f} against "
            f"{before:.2f} on held-out conversations. It is not published; more conversations of the domains that it "
            "will serve are the first thing to try"
        )
    return new, before


def publish(job: TrainingJob) -> dict[str, Any]:
    """Publish the last rung's drafter; its receipt. Nothing is done twice. Raises RigctlError."""
    parts = runs.parts_of(job)
    if missing := [str(one) for one in runs.steps(job, parts) if not step.is_done(job, one, parts)]:
        raise RigctlError(f"{job.name}: {', '.join(missing)} to be done: `rigctl train start {job.name}`")
    length, before = better(job)
    target = Path(job.publish_path)
    with reached(target) as way:
        if way.shared or way.links:
            who = "; ".join(f"{path} {why}" for path, why in way.shared.items()) or ", ".join(way.links)
            raise RigctlError(f"{target} is not published where others can write: {who}")
    place, export = runs.state(job), f"{job.name}/export/{job.ladder[-1]}"
    known = Receipt.known(place)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        fresh = Path(beside, target.name)
        fresh.mkdir(mode=0o755)
        digests = {name: builder.copied(Path(job.root), f"{export}/{name}", fresh / name) for name in FILES}
        for name in digests:
            (fresh / name).chmod(0o644)
        if known is None or known.files != digests or not target.exists():
            if target.exists() and known is None:
                raise RigctlError(f"{target} is there and was not published by this training: move it away")
            _fits(job, fresh)
            os.sync()
            if target.exists():
                target.rename(Path(beside, "old"))
            fresh.rename(target)
        receipt = _receipt(job, digests, length, before)
        place.write(RECEIPT, record_text(receipt))
        shutil.rmtree(Path(beside, "old"), ignore_errors=True)
    return receipt


def _fits(job: TrainingJob, drafter: Path) -> None:
    """Every engine that it was evaluated in takes it; how long a context may be, the deploy of a unit says."""
    training = Training(target=job.target, convention=job.convention, layer_ids=job.states.layer_ids[:-1])
    refused = []
    for one in job.evaluation.engines:
        verdict = check(Path(job.target_path), drafter, Engine(one.engine, one.version), 1, training, name=job.target)
        refused += [f"{one.release}: {text}" for text in verdict.refuse]
    if refused:
        raise RigctlError(f"{job.publish} does not fit: {'; '.join(refused)}")


def _receipt(job: TrainingJob, digests: dict[str, str], length: float, before: float) -> dict[str, Any]:
    """What the drafter was made from, in the words of the order; the metrics of every step."""
    records, parts = Place(job.directory), runs.parts_of(job)
    found = {str(one): step.known(records, one) for one in runs.steps(job, parts)}
    trained = found[str(Step("train", job.ladder[-1], parts - 1))]
    return {
        "name": job.publish,
        "training": {"target": job.target, "convention": job.convention, "layer_ids": job.states.layer_ids[:-1]},
        "provenance": {
            "engine": job.states.served.engine,
            "version": job.states.served.version,
            "samples": job.ladder[-1],
            "epochs": job.recipe.epochs,
            **({"start": job.start.name} if job.start else {}),
        },
        "path": job.publish_path,
        "files": digests,
        "order": job.document(),
        "steps": {name: one.model_dump() for name, one in found.items() if one},
        "loss": trained.loss if trained else None,
        "length": length,
        "length_before": before,
        "evaluation": evaluated(job).document(),
        "at": int(time.time()),
    }
