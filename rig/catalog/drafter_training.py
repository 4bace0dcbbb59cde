"""Entries of training.yaml: how a drafter of one's own is made. docs/reference/training.md has the keys."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from rigctl.contract.checkpoint_job import NAME
from rigctl.contract.fields import Count, Positive, Text
from rigctl.contract.order import Part, nearest
from rigctl.contract.speculation import EXTRACTS
from rigctl.contract.training_job import Fraction, Rate, Recipe, Rung

FEBRUARY = 3165.0
"""Tokens a second that were extracted in February 2026 from Kimi-K2.5 on eight cards."""


class PromptSource(Part):
    """A file of conversations on the machine that deploys: JSONL of `messages` and perhaps `tools`."""

    file: Text
    """Relative to this repository, or absolute."""
    domain: Text
    licence: Text
    provenance: Text


class Prompts(Part):
    """What the target is asked."""

    files: Annotated[list[PromptSource], Field(min_length=1)]
    held_out: Fraction = 0.1
    """Share of the conversations that nothing is trained on."""
    seed: Count = 0


class AnswersFrom(Part):
    """Who answers the prompts, and how."""

    configuration: Text
    """A serving configuration with a served_model_name that asks for no key: best `listen: {private: true}`."""
    max_tokens: Positive
    concurrency: Positive = 32
    sampling: dict[Text, Any] = {}


class StatesFrom(Part):
    """Who writes the hidden states down."""

    configuration: Text
    """A serving configuration whose method is extract_hidden_states: its `layers` are what the drafter reads."""
    disk_limit: Positive
    """Bytes of states at once; what does not fit is extracted and trained on in parts."""
    concurrency: Positive = 32


class EvaluatedIn(Part):
    """Where drafters are counted."""

    configurations: Annotated[list[Text], Field(min_length=1)]
    """Serving configurations without speculation; each gets the drafter under test."""
    steps: Annotated[int, Field(ge=1, le=16)] = 3
    drafters: list[Text] = []
    """Checkpoints that exist and are counted beside the new one."""
    streams: list[Positive] = [1, 8, 32]
    max_tokens: Positive = 512
    rows: Positive = 200


class DrafterTraining(Part):
    """One training: an entry of training.yaml."""

    description: str = ""
    target: Text
    start: Text | None = None
    """Drafter that it continues; unset: it begins untrained."""
    trainer: Text
    """A release of kind trainer."""
    gpus: list[Annotated[int, Field(ge=0, le=63)]]
    """Cards of the trainer; none where its release runs on the CPU."""
    prompts: Prompts
    answers: AnswersFrom
    states: StatesFrom
    recipe: Recipe
    ladder: Annotated[list[Rung], Field(min_length=1)]
    tokens_a_row: Positive = 1444
    """Expected; February's answers had so many."""
    rate: Rate = FEBRUARY
    """Tokens a second of extraction, expected."""
    evaluation: EvaluatedIn
    publish: Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
    """Name of the checkpoint; it lies in {drafters}/<name>."""

    @property
    def configurations(self) -> list[str]:
        """Serving configurations that a host needs for it."""
        return list(
            dict.fromkeys([self.answers.configuration, self.states.configuration, *self.evaluation.configurations])
        )

    @property
    def drafters(self) -> list[str]:
        """Checkpoints of drafters that a host needs for it."""
        return list(dict.fromkeys([*([self.start] if self.start else []), *self.evaluation.drafters]))


Tell = Callable[[tuple[str | int, ...], str], Any]


def faults(
    entry: DrafterTraining, serving: Mapping[str, Any], checkpoints: Mapping[str, Any], trainers: Mapping[str, Any]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(keys, what is wrong) of what an entry names in the other catalogues."""
    target = checkpoints.get(entry.target)
    if target is None or target.role != "target":
        yield ("target",), f"there is no target {entry.target}{nearest(entry.target, checkpoints)}"
    drafters = [(("start",), entry.start)] if entry.start else []
    for key, name in (*drafters, *((("evaluation", "drafters"), one) for one in entry.evaluation.drafters)):
        if name not in checkpoints or checkpoints[name].role != "drafter":
            yield key, f"there is no drafter {name}{nearest(name, checkpoints)}"
    trainer = trainers.get(entry.trainer)
    if trainer is None:
        yield ("trainer",), f"there is no release of kind trainer {entry.trainer}{nearest(entry.trainer, trainers)}"
    elif (trainer.accelerator == "cpu") == bool(entry.gpus):
        yield ("gpus",), f"{entry.trainer} runs on {trainer.accelerator}: {'none' if entry.gpus else 'name its cards'}"
    places = [(("answers", "configuration"), entry.answers.configuration)]
    places += [(("states", "configuration"), entry.states.configuration)]
    places += [(("evaluation", "configurations"), name) for name in entry.evaluation.configurations]
    for key, name in places:
        found = serving.get(name)
        if found is None:
            yield key, f"there is no configuration {name}{nearest(name, serving)}"
            continue
        method = found.speculation.method if found.speculation else None
        if found.target != entry.target:
            yield key, f"{name} serves {found.target}, not {entry.target}"
        if key[0] == "answers" and (found.served_model_name or "/").startswith("/"):
            yield (
                key,
                f"{name} has no served_model_name: the client looks for the tokenizer under it, a path will not do",
            )
        if (key[0] == "states") != (method == EXTRACTS):
            yield key, f"{name} speculates by {method}; {'states need' if key[0] == 'states' else 'not'} {EXTRACTS}"
        if key[0] == "evaluation" and method is not None:
            yield key, f"{name} speculates: name one without, the drafter under test is added to it"
    published = checkpoints.get(entry.publish)
    if published is not None and published.source.kind != "directory":
        yield ("publish",), f"there is a checkpoint {entry.publish} already, and it comes from elsewhere"
