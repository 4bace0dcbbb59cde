"""One step of a training, as the service user: root starts its process (`runs.py`), with the order on its input."""

import hashlib
import importlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rigctl import builder
from rigctl.contract.happened import record_text
from rigctl.contract.training_job import STAGES, Stage, TrainingJob
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.kernel.children import end_with_us
from rigctl.training.place import Step, Workplace
from rigctl.training.progress import Counted, Figure, Progress

AGAIN = "again"
"""Third argument: what the step has made is made anew."""


class Stepped(BaseModel):
    """What is known of one step: step-<step>.json. seconds: of the run that ended it."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    digest: str
    done: bool = False
    ladder: Counted = 0
    """Conversations that it was asked for: a longer ladder goes on with what is there."""
    rows: Counted = 0
    tokens: Counted = 0
    seconds: Figure = 0.0
    rate: Figure | None = None
    loss: Figure | None = None


def file_of(step: Step) -> str:
    return f"step-{step}.json"


def known(place: Place, step: Step) -> Stepped | None:
    """What is recorded of a step; None where that is nothing, or cannot be used."""
    with suppress(OSError, ValidationError):
        return Stepped.model_validate_json(place.read(file_of(step)))
    return None


def is_done(job: TrainingJob, step: Step, parts: int) -> bool:
    """Whether a step has made all that this order asks of it."""
    found = known(Place(job.directory), step)
    asked = job.ladder[-1] if step.stage == "answers" else 0
    return found is not None and found.done and found.ladder >= asked and found.digest == digest(job, step, parts)


def digest(job: TrainingJob, step: Step, parts: int = 1) -> str:
    """Over all of the order that decides what a step makes: another one, and it is made anew."""
    whole = job.document()
    taken: dict[Stage, Any] = {
        "answers": [
            *(whole["prompts"], job.held_out, job.split_seed, job.target_path, job.target_revision),
            *(job.answers.max_tokens, job.answers.sampling, job.answers.served.engine, job.answers.served.version),
        ],
        "prepare": [job.recipe.sequence_length],
        "states": [job.states.layer_ids, job.states.served.engine, job.states.served.version],
        "train": [whole["recipe"], whole["start"], job.trainer.lock_sha256],
        "export": [],
        "evaluate": [whole["evaluation"], job.ladder],
    }
    chain = [taken[stage] for stage in STAGES[: STAGES.index(step.stage) + 1]]
    of = [] if step.stage in ("answers", "evaluate") else [step.rung, step.part, parts]
    return hashlib.sha256(json.dumps([chain, of], sort_keys=True).encode()).hexdigest()


def made(place: Workplace) -> Iterator[Path]:
    """What a step makes, as far as no other step needs it."""
    yield {
        "answers": place.answers,
        "prepare": place.prepared,
        "states": place.states,
        "train": place.checkpoints,
        "export": place.export,
        "evaluate": place.evaluation,
    }[place.step.stage]


def run(job: TrainingJob, step: Step, parts: int, *, again: bool = False) -> None:
    """Do a step, or what is left of it. Raises RigctlError."""
    place, records = Workplace.of(job, step, parts), Place(job.directory)
    wanted, before = digest(job, step, parts), known(records, step)
    if is_done(job, step, parts) and not again:
        return
    if before is None or before.digest != wanted or again:
        for path in made(place):
            shutil.rmtree(path, ignore_errors=True)
    records.write(file_of(step), record_text(Stepped(digest=wanted, ladder=job.ladder[-1]).model_dump()))
    progress, begun = Progress(place.root, step), time.monotonic()
    progress.tell(phase="begins")
    importlib.import_module(f"rigctl.training.{step.stage}").run(job, place, progress)
    if step.stage == "train" and parts > 1:
        _drop_states(place)
    last = progress.last
    progress.tell(phase="done")
    done = Stepped(
        digest=wanted,
        done=True,
        ladder=job.ladder[-1],
        rows=last.rows_done,
        tokens=last.tokens,
        seconds=time.monotonic() - begun,
        rate=last.rate,
        loss=last.loss,
    )
    records.write(file_of(step), record_text(done.model_dump()))


def _drop_states(place: Workplace) -> None:
    """Of a part that has been trained on: the next one needs the room."""
    shutil.rmtree(place.states, ignore_errors=True)
    for path in place.kept.glob("*") if place.kept.is_dir() else ():
        if path.stat().st_nlink == 1:
            path.unlink()


def main() -> int:
    """Do the step that the arguments name, of the order on standard input; exit code 1 where it cannot be done."""
    builder.inside()
    step, parts = Step.parse(sys.argv[1]), int(sys.argv[2])
    with end_with_us():
        try:
            run(TrainingJob.parse_text(sys.stdin.read(), "the order"), step, parts, again=sys.argv[3:] == [AGAIN])
        except (RigctlError, OSError) as error:
            where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
            print(where, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
