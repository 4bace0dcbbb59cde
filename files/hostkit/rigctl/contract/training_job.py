"""The order for one training of a drafter, /etc/kimi-rig/training/<name>.json: from prompts to files to serve.

Stages: answers, prepare, states, train, export, evaluate. Lengths are tokens, sizes bytes, durations seconds.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from rigctl.contract.checkpoint_job import CheckpointName
from rigctl.contract.eagle3_conventions import Convention
from rigctl.contract.evaluation import Origin
from rigctl.contract.fields import Count, HostPath, Positive, Sha256, Text, Variable
from rigctl.contract.order import Order, Part

Stage = Literal["answers", "prepare", "states", "train", "export", "evaluate"]
STAGES: tuple[Stage, ...] = ("answers", "prepare", "states", "train", "export", "evaluate")
Rung = Annotated[int, Field(ge=0)]
"""Conversations that a drafter of the ladder is trained on; 0: the start as it is, or an untrained drafter."""
Fraction = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BYTES_A_VALUE = 2
"""Of a state: bfloat16."""


class PromptFile(Part):
    """One file of conversations, JSONL of `messages` and perhaps `tools`, as it lies on the host."""

    path: HostPath
    sha256: Sha256
    domain: Text
    """What the report calls its rows: chat, reasoning, code, tools."""
    licence: Text
    provenance: Text


class Served(Part):
    """A serving configuration of this host that a stage asks, over loopback, without a key."""

    name: Text
    url: Annotated[str, StringConstraints(pattern=r"^http://[\w.:\[\]-]+$")]
    model: Text
    """Name that clients use."""
    private: bool
    """It listens in a network of its own: the stage joins it."""
    engine: Literal["vllm", "sglang"]
    version: Text


class Answers(Part):
    """What the target says to the prompts."""

    served: Served
    max_tokens: Positive
    """Of one answer with its thought: one that is cut ends the stage with a complaint, not with half a row."""
    concurrency: Positive = 32
    sampling: dict[Text, Any] = {}


class States(Part):
    """The target's hidden states of every token."""

    served: Served
    layer_ids: Annotated[list[Count], Field(min_length=1)]
    """Input ids (eagle3_conventions.py); the last one is the number of layers: the state that the head reads."""
    staging: HostPath
    """Where the engine's connector writes; on the file system of `root`."""
    disk_limit: Positive
    """Bytes that states may take at once: what does not fit is extracted and trained on in parts."""
    concurrency: Positive = 32


class Recipe(Part):
    """How the drafter is trained (`speculators train`)."""

    epochs: Positive
    learning_rate: Rate
    schedule: Literal["linear", "cosine", "none"] = "cosine"
    optimizer: Text = "adamw"
    draft_vocabulary: Positive
    sequence_length: Positive
    steps: Positive = 3
    """Tokens that it learns to draft one after another."""
    seed: Count = 0
    checkpoint_share: Fraction | None = None
    """A checkpoint after each such share of an epoch; unset: one an epoch."""
    draft: dict[Text, Any] = {}
    """Keys of the draft configuration beyond what follows from the target (rigctl/training/draft_config.py)."""
    arguments: list[Text] = []
    """Further ones of the trainer."""


class Trainer(Part):
    """The environment of speculators, and where it runs."""

    environment_path: HostPath
    version: Text
    lock_sha256: Sha256
    gpus: list[Count]
    """Cards that it claims; none: it runs on the CPU."""
    starter: HostPath | None = None
    """Program that is run in the place of `python -m speculators`, for a machine without an accelerator."""
    variables: dict[Variable, str] = {}


class Evaluated(Part):
    """An engine in which drafters are counted: started by the stage in its own network, ended with it."""

    name: Text
    """Of the serving configuration whose command line this is, such as vllm-base."""
    engine: Literal["vllm", "sglang"]
    version: Text
    release: Text
    url: Annotated[str, StringConstraints(pattern=r"^http://[\w.:\[\]-]+$")]
    model: Text
    base: Annotated[list[Text], Field(min_length=1)]
    """Command line without speculation."""
    drafting: Annotated[list[Text], Field(min_length=1)]
    """Command line with speculation; "{drafter}" stands, also within a word, for the directory of the drafter."""
    steps: Positive
    variables: dict[Variable, str] = {}


class Known(Part):
    """A drafter that exists already and is evaluated beside ours."""

    name: CheckpointName
    path: HostPath
    origin: Origin = Origin()


class Evaluation(Part):
    """What a drafter is counted with."""

    engines: list[Evaluated]
    drafters: list[Known] = []
    streams: list[Positive] = [1, 8, 32]
    max_tokens: Positive = 512
    rows: Positive = 200
    """Held-out conversations, at most."""


class TrainingJob(Order):
    """One training. Its directory is <root>/<name>, the service user's; `root` is root's."""

    name: CheckpointName
    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.-]*$")]
    root: HostPath
    target: CheckpointName
    target_path: HostPath
    target_revision: Text | None = None
    hidden: Positive
    layers: Positive
    vocabulary: Positive
    start: Known | None = None
    """The drafter that it continues; None: it begins untrained."""
    prompts: Annotated[list[PromptFile], Field(min_length=1)]
    held_out: Fraction
    """Share of the conversations that nothing is trained on, drawn by conversation with `split_seed`."""
    split_seed: Count = 0
    answers: Answers
    states: States
    recipe: Recipe
    trainer: Trainer
    ladder: Annotated[list[Rung], Field(min_length=1)]
    """Rising; the last one is what is published. A rung's conversations are the first ones of every later rung's."""
    tokens_a_row: Positive
    """Expected, for what `plan` says before there are answers."""
    rate: Rate
    """Tokens a second of extraction, expected: the host's own once it has extracted."""
    evaluation: Evaluation
    convention: Convention = "input"
    publish: CheckpointName
    """Name of the checkpoint and of the directory that it is published as."""
    publish_path: HostPath

    @model_validator(mode="after")
    def _ladder_rises(self) -> Self:
        if self.ladder != sorted(set(self.ladder)) or self.ladder[-1] == 0:
            raise ValueError("ladder: numbers that rise, the last one above 0")
        if self.states.layer_ids != sorted(set(self.states.layer_ids)) or self.states.layer_ids[-1] != self.layers:
            raise ValueError(f"states.layer_ids: rising, and the last one is {self.layers}, the number of layers")
        return self

    @property
    def bytes_a_token(self) -> int:
        """Of states: 57,344 at hidden 7,168 with four layers."""
        return self.hidden * len(self.states.layer_ids) * BYTES_A_VALUE

    @property
    def directory(self) -> str:
        return f"{self.root}/{self.name}"

    def trained_rungs(self) -> Iterator[int]:
        return (rung for rung in self.ladder if rung)
