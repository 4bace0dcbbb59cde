"""Where a training keeps what it makes: a directory of the service user's, used by path in its own processes alone."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rigctl.contract.training_job import Stage, TrainingJob


@dataclass(frozen=True)
class Step:
    """One step of a training: a stage, of a rung of the ladder, of a part of its rows (0 where all fit at once)."""

    stage: Stage
    rung: int = 0
    part: int = 0

    def __str__(self) -> str:
        return f"{self.stage}-{self.rung}-{self.part}"

    @classmethod
    def parse(cls, text: str) -> Self:
        stage, rung, part = text.split("-")
        return cls(stage, int(rung), int(part))  # type: ignore[arg-type]  # a stage by our own text


@dataclass(frozen=True)
class Workplace:
    """The directories of one step. parts: into how many the rung's rows are divided."""

    root: Path
    step: Step
    parts: int = 1

    @classmethod
    def of(cls, job: TrainingJob, step: Step, parts: int = 1) -> Self:
        return cls(Path(job.directory), step, parts)

    def at(self, **changed: object) -> Self:
        """The same training at another step: `place.at(rung=100)`."""
        return replace(self, step=replace(self.step, **changed))  # type: ignore[arg-type]  # fields of Step by name

    @property
    def answers(self) -> Path:
        """Of all rungs: answers, errors, and the split into train.jsonl and held_out.jsonl."""
        return self.root / "answers"

    @property
    def text_view(self) -> Path:
        """The target as speculators reads it."""
        return self.root / "text-view"

    @property
    def start(self) -> Path:
        """The start as the trainer takes it: in speculators' form, in float32."""
        return self.root / "start"

    @property
    def kept(self) -> Path:
        """States by the sha256 of their tokens, which rungs share."""
        return self.root / "states" / "kept"

    @property
    def prepared(self) -> Path:
        """What `speculators prepare-data` wrote for this rung and part."""
        return self._numbered("prepared")

    @property
    def states(self) -> Path:
        """hs_<row>.safetensors of this rung and part."""
        return self._numbered("states")

    @property
    def checkpoints(self) -> Path:
        """The trainer's own: 0, 1, ... of this rung and part."""
        return self._numbered("checkpoints")

    @property
    def export(self) -> Path:
        """The drafter of this rung as engines read it."""
        return self.root / "export" / str(self.step.rung)

    @property
    def evaluation(self) -> Path:
        """Counts by rung and drafter, report.md, report.html, evaluation.json."""
        return self.root / "evaluation"

    def _numbered(self, folder: str) -> Path:
        return self.root / folder / str(self.step.rung) / str(self.step.part)
