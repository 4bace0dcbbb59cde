"""The quality canary: fixed prompts with known answers, and what a model answered to them.

Engines have served fluent garbage and "!" at full speed, which passes a short completion: above 100k tokens with an FP8
cache (vllm#42426), by a wrong FP4 kernel (flashinfer#2708).
"""

import hashlib
import os
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rigctl.contract import layout
from rigctl.contract.answering import Parameters
from rigctl.contract.fields import Text
from rigctl.contract.happened import Happened
from rigctl.contract.order import Order, Part
from rigctl.guarded import Place


class Call(Part):
    """A call of the function that the model was asked to write, and what it must return."""

    call: Text
    """A Python expression, such as `add(2, 3)`."""
    gives: Any
    """A JSON value."""


class Tool(Part):
    """A tool that is declared, and the call that is expected."""

    name: Text
    description: Text
    parameters: dict[str, Any]
    """JSON schema of its arguments."""
    arguments: dict[str, Any]
    """What the call must say: numbers equal, texts at least contained, whatever their case."""


class Haystack(Part):
    """A long text before the question, in which one sentence is what is asked for."""

    sentence: Text
    """Repeated, with a number before it, until the text is as long as it shall be."""
    hidden: Text
    share: Annotated[float, Field(gt=0, le=0.98)] = 0.9
    """Of the context that is left beside question and answer: tokens of this text."""
    depth: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Where in the text `hidden` stands: 0 begins it, 1 ends it."""


class Prompt(Part):
    """One question; at least one of the checks below it."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    ask: Text
    request: Parameters = {}
    """Further parameters of the request, such as chat_template_kwargs."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """The answer may take so many, with the reasoning before it; unset, what the family takes."""
    haystack: Haystack | None = None
    says: list[Text] = []
    """Each must stand in the answer, whatever its case; words of one line."""
    number: float | None = None
    """The last number of the answer."""
    answer: Text | None = None
    """The whole answer, blanks at its ends aside."""
    reasoning: Text | None = None
    """The whole reasoning, likewise."""
    calls: list[Call] = []
    """The answer has a block of Python code, which is run; then each call gives its value."""
    tool: Tool | None = None

    @model_validator(mode="after")
    def _is_checked(self) -> Self:
        if not (self.says or self.calls or self.tool) and (self.number, self.answer, self.reasoning) == (None,) * 3:
            raise ValueError("a prompt has one of: says, number, answer, reasoning, calls, tool")
        return self


class CanaryPrompts(Order):
    """What a model is asked: /etc/kimi-rig/canary/<target's checkpoint>.json."""

    FORMAT: ClassVar[int] = 1

    rounds: Annotated[int, Field(ge=1, le=20)] = 3
    """How often each is asked: whether the engine is deterministic, and how far its score spreads, shows by that."""
    prompts: Annotated[list[Prompt], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [prompt.name for prompt in self.prompts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two prompts are named {', '.join(twice)}")
        return self


class Answered(Part):
    """What came to one prompt, round by round."""

    held: Annotated[list[bool], Field(min_length=1)]
    """Whether all checks of the prompt held."""
    texts: list[str]
    """sha256 of reasoning, answer and tool calls."""
    why: str | None = None
    """The first check that did not hold, of the first round in which one did not."""
    shown: str = ""
    """The start of the first answer."""

    @model_validator(mode="after")
    def _one_a_round(self) -> Self:
        if len(self.held) != len(self.texts):
            raise ValueError("held and texts have one a round")
        return self

    @property
    def share(self) -> float:
        """Of the rounds in which it held, 0 to 1."""
        return sum(self.held) / len(self.held)

    @property
    def text(self) -> str | None:
        """The one text of all rounds; None where they differ."""
        return self.texts[0] if len({*self.texts}) == 1 else None


class Settings(Part):
    """What answered."""

    configuration: Text
    digest: Text
    """Of the specification that the engine was started with."""
    release: Text
    flags: list[str]
    """The engine's command line."""
    cache: Text
    """Type of its KV cache, as the command line names it; auto where it does not."""
    method: str | None
    drafter: str | None


class CanaryRun(Happened):
    """One run of the prompts on one engine. at: Unix seconds."""

    FILE = "baseline.json"

    at: int
    target: str
    identity: str
    """Of the target's content, as staging knows it: its revision."""
    prompts: str
    """sha256 of what was asked: other prompts have other answers."""
    settings: Settings
    answers: dict[str, Answered]

    @property
    def scores(self) -> list[float]:
        """By round, the share of prompts whose checks held."""
        rounds = zip(*(found.held for found in self.answers.values()), strict=True)
        return [sum(held) / len(held) for held in rounds]


class CanaryOutcome(Happened):
    """How the last run of a configuration compared with the baseline."""

    FILE = "outcome.json"

    verdict: Literal["same", "better", "worse"]
    reasons: list[str]
    run: CanaryRun
    baseline_at: int


_OUTCOME = "outcome-"


def baseline_place(target: str, identity: str) -> Place:
    """Of a model at a revision, whichever configuration serves it."""
    revision = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Place(f"{layout.CANARY}/baseline-{target}-{revision}")


def outcome_place(configuration: str) -> Place:
    """Of the last run on a configuration."""
    return Place(f"{layout.CANARY}/{_OUTCOME}{configuration}")


def outcomes() -> dict[str, dict[str, Any]]:
    """Configuration -> how its last canary ended, on what, and when; for the ledger of the benchmark."""
    found = {}
    for name in _names():
        if known := CanaryOutcome.known(outcome_place(name)):
            settings = known.run.settings.model_dump(mode="json")
            found[name] = {"verdict": known.verdict, "at": known.run.at, "score": min(known.run.scores), **settings}
    return found


def _names() -> list[str]:
    with suppress(FileNotFoundError), Place(layout.CANARY).opened() as directory:
        names = os.listdir(directory)  # noqa: PTH208  # of a descriptor
        return sorted(name.removeprefix(_OUTCOME) for name in names if name.startswith(_OUTCOME))
    return []
