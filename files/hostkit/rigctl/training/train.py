"""`speculators train` of one rung and part: its command line, its checkpoints after a kill, which one is taken.

Read in speculators 0.9.0: a resume takes the highest numbered checkpoint and expects it whole; `interrupted` says no
step and would count as a whole epoch; the figures of the validation are written for the epoch of the lowest loss alone.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rigctl.checkpoints import headers
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training import draft_config, prepare, tensors, text_view, tool
from rigctl.training.place import Workplace
from rigctl.training.progress import Progress
from rigctl.whole_files import read_json, read_object, write_json

WEIGHTS, OPTIMIZER, STATE, METRICS = (
    "model.safetensors",
    "optimizer_state_dict.pt",
    "training_state.json",
    "val_metrics.json",
)
ON_CPU = (
    "--num-workers", "0", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager",
    "--hidden-states-dtype", "float32",
)  # fmt: skip
"""What works without an accelerator; float32 is faster there (200 against 61 tokens a second)."""


def run(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Train, or go on where a killed run was. Rung 0: the start as it is, or an untrained drafter."""
    text_view.write(Path(job.target_path), place.text_view)
    if place.step.rung == 0:
        _untrained(job, place, progress)
        return
    rows = prepare.rows(place)
    epochs = job.recipe.epochs
    progress.tell(phase="train", rows=epochs, rows_done=0)
    log = place.root / f"logs/train-{place.step.rung}-{place.step.part}.log"
    if not mend(place.checkpoints, epochs, log):
        # Figures of another training must not be taken for this one's.
        log.unlink(missing_ok=True)
    if not (place.checkpoints / str(epochs - 1) / METRICS).exists():
        said = Said(log)

        def watch() -> None:
            said.update()
            progress.tell(rows_done=said.epoch, loss=said.loss)

        tool.run(
            command(job, place, rows), "speculators train", log=log, variables=tool.environment(job, place),
            directory=place.root, watch=watch,
        )  # fmt: skip
    note_validations(log, place.checkpoints)
    metrics = read_metrics(finished(place))
    progress.tell(phase=f"trained, offline acceptance length {length(metrics):.3f}", rows_done=epochs)


def command(job: TrainingJob, place: Workplace, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The command line of one rung and part."""
    recipe, trained = job.recipe, sum(not row["held_out"] for row in rows)
    words = [
        "train", "--speculator-type", "eagle3", "--verifier-name-or-path", str(place.text_view),
        "--data-path", str(place.prepared), "--hidden-states-path", str(place.states), "--on-missing", "raise",
        # The trainer cuts at int(rows * ratio): between the last training and the first held-out conversation.
        "--train-data-ratio", repr((trained + 0.5) / len(rows)), "--total-seq-len", str(recipe.sequence_length),
        "--ttt-steps", str(recipe.steps), "--epochs", str(recipe.epochs), "--lr", repr(recipe.learning_rate),
        "--scheduler-type", recipe.schedule, "--optimizer", recipe.optimizer, "--seed", str(recipe.seed),
        "--checkpoint-freq", repr(recipe.checkpoint_share or 1), "--save-path", str(place.checkpoints),
    ]  # fmt: skip
    return tool.speculators(job, *words, *_begin(job, place), *_device(job), *recipe.arguments, spread=True)


def _begin(job: TrainingJob, place: Workplace) -> list[str]:
    """Where the weights come from: the part before, the start, or none. A start keeps its own vocabulary map."""
    layers = ["--target-layer-ids", *map(str, job.states.layer_ids[:-1])]
    if place.step.part:
        before = place.root / "start-of-parts" / str(place.step.rung) / str(place.step.part)
        float32(finished(place.at(part=place.step.part - 1)), before)
        return ["--from-pretrained", str(before), *layers]
    if job.start:
        started(job, place, job.start.path)
        return ["--from-pretrained", str(place.start), *layers]
    return [*_fresh(job, place), *layers]


def _fresh(job: TrainingJob, place: Workplace) -> list[str]:
    target = read_json(place.text_view / "config.json", "config of the text view")
    config = place.root / "draft.json"
    rung = place.at(rung=place.step.rung or job.ladder[-1], part=0)
    write_json(config, draft_config.draft_config(target, job.recipe.draft))
    return [
        "--draft-config", str(config), *draft_config.FLAGS,
        "--draft-vocab-size", str(job.recipe.draft_vocabulary),
        "--token-freq-path", str(rung.prepared / prepare.FREQUENCIES),
    ]  # fmt: skip


def _device(job: TrainingJob) -> list[str]:
    return [] if job.trainer.gpus else list(ON_CPU)


def _untrained(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Rung 0 as checkpoint 0."""
    destination = place.checkpoints / "0"
    if (destination / WEIGHTS).exists():
        return
    progress.tell(phase="the drafter before training")
    place.checkpoints.mkdir(parents=True, exist_ok=True)
    if job.start:
        started(job, place, job.start.path)
        unfinished = place.checkpoints / ".0.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(place.root / "converted", unfinished)
        unfinished.rename(destination)
        return
    words = [
        "train", "--dry-run", "--speculator-type", "eagle3", "--verifier-name-or-path", str(place.text_view),
        "--data-path", str(place.at(rung=job.ladder[-1], part=0).prepared), "--save-path", str(destination),
        "--seed", str(job.recipe.seed),
        *_fresh(job, place), "--target-layer-ids", *map(str, job.states.layer_ids[:-1]), *_device(job),
    ]  # fmt: skip
    tool.run(
        tool.speculators(job, *words), "speculators train --dry-run", log=place.root / "logs/train-0-0.log",
        variables=tool.environment(job, place), directory=place.root,
    )  # fmt: skip


def started(job: TrainingJob, place: Workplace, start: str) -> None:
    """The start in speculators' form (<root>/converted) and in float32 (`place.start`).

    A start in bfloat16 is trained in bfloat16, in which most steps of a small learning rate round to nothing.
    """
    converted = place.root / "converted"
    if not (converted / WEIGHTS).exists():
        shutil.rmtree(converted, ignore_errors=True)
        settings = json.dumps(
            {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": job.states.layer_ids[:-1]}
        )
        unfinished = place.root / ".converted.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        tool.run(
            tool.speculators(
                job, "convert", start, "--algorithm", "eagle3", "--verifier", str(place.text_view),
                "--algorithm-kwargs", settings, "--output-path", str(unfinished),
            ),
            "speculators convert", log=place.root / "logs/convert.log",
            variables=tool.environment(job, place), directory=place.root,
        )  # fmt: skip
        unfinished.rename(converted)
    float32(converted, place.start)


def float32(source: Path, destination: Path) -> None:
    """A copy of a speculators checkpoint's config and weights in float32; left alone if it is there."""
    if (destination / "config.json").exists():
        return
    destination.mkdir(parents=True, exist_ok=True)
    tensors.copy(headers.read(source / WEIGHTS), destination / WEIGHTS, to_float32=True)
    config = read_json(source / "config.json", "config of the start")
    config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    config.pop("auto_map", None)
    write_json(destination / "config.json", config)


def mend(checkpoints: Path, epochs: int, log: Path) -> bool:
    """Make what a killed or stopped trainer left resumable: whole checkpoints only, the last validation still to come.

    log: of this training. Whether there is anything to resume.
    """
    if not checkpoints.is_dir():
        return False
    # It knows no step: counted as an epoch, the rest of that epoch would never be trained on.
    shutil.rmtree(checkpoints / "interrupted", ignore_errors=True)
    while (found := _epochs(checkpoints)) and not whole(checkpoints / str(found[-1])):
        broken = checkpoints / str(found[-1])
        print(f"removed: {broken} is not a whole checkpoint", flush=True)
        shutil.rmtree(broken)
    note_validations(log, checkpoints)
    if found and found[-1] == epochs - 1 and not (checkpoints / str(found[-1]) / METRICS).exists():
        # Killed in the validation after the last epoch: beyond its last step there is nothing to train but the
        # validation.
        state = read_object(checkpoints / str(found[-1]) / STATE) or {}
        step = int(state.get("global_step", 0))
        write_json(
            checkpoints / str(found[-1]) / STATE, {"epoch": found[-1], "local_step": max(1, step), "global_step": step}
        )
    return bool(found)


def note_validations(log: Path, checkpoints: Path) -> None:
    """Write down beside each epoch what its validation has said.

    The trainer does so for the epoch of the lowest loss alone. That is not the best drafter: where held-out prompts ask
    for what it was not trained on, loss rises with certainty.
    """
    if not log.exists():
        return
    with log.open(encoding="utf-8", errors="replace") as said:
        for line in said:
            epoch = re.search(r"[ ,]epoch=(\d+)", line)
            if epoch and (figures := re.findall(r"val/(\w+)=([\d.e+-]+)", line)):
                place = checkpoints / epoch[1] / METRICS
                if place.parent.is_dir() and not place.exists():
                    write_json(place, {name: float(value) for name, value in figures})


def whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: the state is the last file, and older than no other."""
    state = checkpoint / STATE
    if read_object(state) is None:
        return False
    try:
        headers.read(checkpoint / WEIGHTS)
        written = max((checkpoint / name).stat().st_mtime_ns for name in (WEIGHTS, OPTIMIZER))
    except (headers.BadFile, OSError):
        return False
    return zipfile.is_zipfile(checkpoint / OPTIMIZER) and state.stat().st_mtime_ns >= written


def finished(place: Workplace) -> Path:
    """The checkpoint that is taken: the epoch with the greatest offline acceptance length; of rung 0 the only one."""
    there = _epochs(place.checkpoints) if place.checkpoints.is_dir() else []
    if place.step.rung == 0 and there:
        return place.checkpoints / "0"
    validated = [one for epoch in there if ((one := place.checkpoints / str(epoch)) / METRICS).exists()]
    if not validated:
        raise RigctlError(f"{place.checkpoints} holds no finished training: run the step train-{place.step.rung} first")
    return max(validated, key=lambda one: (length(read_metrics(one)), int(one.name)))


def read_metrics(checkpoint: Path) -> dict[str, float]:
    """Figures of the validation. Raises RigctlError where they are missing or no numbers."""
    found = read_json(checkpoint / METRICS, "figures of the validation")
    if not isinstance(found, dict) or not all(isinstance(one, int | float) for one in found.values()):
        raise RigctlError(f"{checkpoint / METRICS} is not an object of numbers")
    return {key: float(one) for key, one in found.items()}


def positions(metrics: dict[str, float]) -> list[float]:
    """Share of held-out tokens whose draft was right at this position and all before it."""
    found = {int(hit[1]): one for key, one in metrics.items() if (hit := re.fullmatch(r"full_acc_(\d+)_epoch", key))}
    return [found[position] for position in sorted(found)]


def length(metrics: dict[str, float]) -> float:
    """Offline acceptance length: what a step would yield on held-out conversations."""
    return 1 + sum(positions(metrics))


def _epochs(checkpoints: Path) -> list[int]:
    return sorted(int(one.name) for one in checkpoints.iterdir() if one.name.isdigit() and not one.is_symlink())


class Said:
    """What the trainer's log has said so far."""

    LOSS, EPOCH = re.compile(rb"train/loss=([\d.e+-]+)"), re.compile(rb"[ ,]epoch=(\d+)")

    def __init__(self, log: Path) -> None:
        self.epoch = 0
        self.loss: float | None = None
        self._log = log
        self._read = log.stat().st_size if log.exists() else 0

    def update(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as handle:
            handle.seek(self._read)
            whole, _, _ = handle.read().rpartition(b"\n")
        self._read += len(whole)
        if losses := self.LOSS.findall(whole):
            self.loss = float(losses[-1])
            self.epoch = int(self.EPOCH.findall(whole)[-1])
