"""Every drafter of a training, and those that exist already, with the same held-out prompts in every engine.

One prompt after another for the counters (greedy: texts must be those of the engine without a drafter), then so many
streams at once for the speed. Engines are children of this step in its own network. What an engine and a drafter have
done is kept, so that a killed evaluation goes on with the next pair.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from rigctl import builder
from rigctl.contract.conversations import Prompt
from rigctl.contract.evaluation import (
    Asked,
    Cost,
    Drafter,
    Evaluation,
    InEngine,
    Origin,
    Speed,
    next_rung,
    paying,
    suspects,
)
from rigctl.contract.training_job import Evaluated, TrainingJob
from rigctl.errors import RigctlError
from rigctl.supervisor.engine_client import read_metrics
from rigctl.training import answers, tool, train
from rigctl.training.place import Workplace
from rigctl.training.progress import Progress
from rigctl.whole_files import read_object, write_json

FILE = "evaluation.json"
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
START_SECONDS = 3600.0
"""A large target loads for as long as half an hour."""
ANSWER_SECONDS = 600.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What one prompt brought. tokens: of the answer."""

    text: str
    tokens: int
    drafts: int = 0
    accepted: int = 0


@dataclass
class Measured:
    """One engine with one drafter, or without."""

    answers: dict[str, Answer] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "answers": {name: vars(one) for name, one in self.answers.items()},
            "positions": self.positions,
            "rates": {str(streams): rate for streams, rate in self.rates.items()},
        }

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Measured":
        return cls(
            {name: Answer(**one) for name, one in found["answers"].items()},
            found["positions"],
            {int(streams): rate for streams, rate in found["rates"].items()},
        )


def run(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Measure what is not measured yet, and write evaluation.json."""
    place.evaluation.mkdir(parents=True, exist_ok=True)
    prompts = answers.divided(job).held_out[: job.evaluation.rows]
    paths = drafters(job, place)
    pairs = [(engine, name) for engine in job.evaluation.engines for name in ("", *paths)]
    found: dict[tuple[str, str], Measured] = {}
    progress.tell(phase="evaluate", rows=len(pairs), rows_done=0)
    for number, (engine, name) in enumerate(pairs):
        kept = place.evaluation / f"{engine.name}-{name or 'base'}.json"
        known = read_object(kept)
        if known is None or set(known.get("answers", ())) != {prompt.id for prompt in prompts}:
            progress.tell(phase=f"{engine.name} with {name or 'no drafter'}")
            known = measure(job, place, engine, paths.get(name), prompts).to_json()
            write_json(kept, known)
        found[engine.name, name] = Measured.of(known)
        progress.tell(rows_done=number + 1)
    evaluation = judged(job, place, prompts, paths, found)
    write_json(place.root / FILE, evaluation.model_dump())
    lengths = "; ".join(f"{name} {one.length:.2f}" for name, one in evaluation.drafters.items())
    progress.tell(phase=f"evaluated: {lengths}")


def drafters(job: TrainingJob, place: Workplace) -> dict[str, Path]:
    """Directory of every drafter that is asked, by the name that the report uses."""
    ours = {f"rung-{rung}": place.at(rung=rung).export for rung in job.ladder}
    return {**ours, **{known.name: Path(known.path) for known in job.evaluation.drafters}}


def measure(
    job: TrainingJob, place: Workplace, engine: Evaluated, drafter: Path | None, prompts: Sequence[Prompt]
) -> Measured:
    """Start the engine, ask it, end it."""
    words = [word.replace("{drafter}", str(drafter)) for word in (engine.drafting if drafter else engine.base)]
    log = place.root / "logs" / f"{engine.name}-{drafter.name if drafter else 'base'}.log"
    measured = Measured()
    with started(words, engine, log):
        client = Client(engine)
        before = client.positions()
        for prompt in prompts:
            measured.answers[prompt.id] = client.alone(prompt, job.evaluation.max_tokens)
        after = client.positions()
        measured.positions = [count - (before[at] if at < len(before) else 0) for at, count in enumerate(after)]
        for streams in job.evaluation.streams:
            measured.rates[streams] = client.together(prompts, streams, job.evaluation.max_tokens)
    return measured


@contextlib.contextmanager
def started(words: Sequence[str], engine: Evaluated, log: Path) -> Iterator[None]:
    """The engine as a child, with all its processes ended afterwards. Raises RigctlError with its last words if it
    dies."""
    builder.inside()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as said:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **engine.variables},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(engine.url):
            if child.poll() is not None:
                raise RigctlError(f"{engine.name} ended with {child.returncode} at its start: {tool.last_words(log)}")
            if time.monotonic() > deadline:
                raise RigctlError(f"{engine.name} did not answer within {START_SECONDS / 60:.0f} minutes: see {log}")
            time.sleep(1)
        try:
            yield
        except (requests.RequestException, LookupError, ValueError, TypeError) as error:
            raise RigctlError(f"{engine.name} stopped answering: {error!r}; {tool.last_words(log)}") from error
    finally:
        _end(child)


def _answers(url: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(f"{url}/health", timeout=30).ok
    return False


def _end(child: "subprocess.Popen[bytes]") -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
            break
    # Workers of the engine outlive its first process; the port is theirs too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


class Client:
    """Requests to one engine of this step."""

    def __init__(self, engine: Evaluated) -> None:
        self._engine = engine

    def alone(self, prompt: Prompt, most: int) -> Answer:
        """One prompt with nothing beside it: the engine's counters are its own."""
        drafts, accepted = self._counted()
        said = self._ask(prompt, most)
        after = self._counted()
        return Answer(_text(said), int(said["usage"]["completion_tokens"]), after[0] - drafts, after[1] - accepted)

    def together(self, prompts: Sequence[Prompt], streams: int, most: int) -> float:
        """Output tokens a second of so many streams; every stream asks at least one prompt."""
        chosen = [prompts[number % len(prompts)] for number in range(max(streams, min(len(prompts), 2 * streams)))]
        begun = time.monotonic()
        with ThreadPoolExecutor(streams) as pool:
            said = list(pool.map(lambda prompt: self._ask(prompt, most), chosen))
        return sum(int(one["usage"]["completion_tokens"]) for one in said) / (time.monotonic() - begun)

    def positions(self) -> list[int]:
        """Accepted drafts by position since the engine started (vLLM; SGLang counts none)."""
        found: dict[int, int] = {}
        for family in text_string_to_metric_families(self._metrics()):
            for sample in family.samples:
                if sample.name == POSITIONS and re.fullmatch(r"\d+", sample.labels.get("position", "")):
                    place = int(sample.labels["position"])
                    found[place] = found.get(place, 0) + int(sample.value)
        return [found[place] for place in sorted(found)]

    def _counted(self) -> tuple[int, int]:
        found = read_metrics(self._engine.engine, self._metrics(), self._engine.steps + 1).speculation
        return (found.drafts, found.accepted) if found else (0, 0)

    def _metrics(self) -> str:
        return requests.get(f"{self._engine.url}/metrics", timeout=30).text

    def _ask(self, prompt: Prompt, most: int) -> dict[str, Any]:
        body = {"model": self._engine.model, "temperature": 0, "max_tokens": most, **opening(prompt)}
        answer = requests.post(f"{self._engine.url}/v1/chat/completions", json=body, timeout=ANSWER_SECONDS)
        answer.raise_for_status()
        said: dict[str, Any] = answer.json()
        return said


def opening(prompt: Prompt) -> dict[str, Any]:
    """The conversation up to its first answer, and its tools."""
    row = prompt.row()
    roles = [message["role"] for message in row["messages"]]
    said = row["messages"][: roles.index("user") + 1]
    return {"messages": said, **({"tools": row["tools"], "tool_choice": "auto"} if "tools" in row else {})}


def _text(said: dict[str, Any]) -> str:
    message = said["choices"][0]["message"]
    parts = [message.get("reasoning") or message.get("reasoning_content"), message.get("content")]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return repr((parts, [(call["name"], call["arguments"]) for call in calls]))


def judged(
    job: TrainingJob,
    place: Workplace,
    prompts: Sequence[Prompt],
    paths: dict[str, Path],
    found: dict[tuple[str, str], Measured],
) -> Evaluation:
    """Everything measured, and what follows from it."""
    domains = {prompt.id: prompt.domain for prompt in prompts}
    named = {known.name: known.origin for known in job.evaluation.drafters}
    made: dict[str, Drafter] = {}
    for name in paths:
        rung = int(name.removeprefix("rung-")) if name not in named else None
        made[name] = Drafter(
            rung=rung,
            origin=named[name] if rung is None else _origin(job, rung),
            offline=_offline(job, place, rung) if rung else [],
            engines={
                engine.name: _in_engine(engine, domains, found[engine.name, ""], found[engine.name, name])
                for engine in job.evaluation.engines
            },
        )
    evaluation = Evaluation(
        format=Evaluation.FORMAT, name=job.name, target=job.target, drafters=made,
        cost=Cost(tokens_a_conversation=_tokens(place), bytes_a_token=job.bytes_a_token, rate=job.rate),
    )  # fmt: skip
    said = [line for name, drafter in made.items() for line in suspects(name, drafter, job.target)]
    said += paying(evaluation)
    if line := next_rung(evaluation):
        said.append(line)
    return evaluation.model_copy(update={"findings": said})


def _in_engine(engine: Evaluated, domains: dict[str, str], base: Measured, mine: Measured) -> InEngine:
    return InEngine(
        steps=engine.steps,
        asked=[
            Asked(
                conversation=name, domain=domains[name], tokens=one.tokens, drafts=one.drafts, accepted=one.accepted,
                identical=one.text == base.answers[name].text,
            )
            for name, one in mine.answers.items()
        ],
        positions=mine.positions,
        speeds=[
            Speed(streams=streams, base=base.rates[streams], drafting=rate)
            for streams, rate in sorted(mine.rates.items())
            if streams in base.rates
        ],
    )  # fmt: skip


def _origin(job: TrainingJob, rung: int) -> Origin:
    start = job.start.origin if job.start else Origin()
    if not rung:
        return start
    return Origin(
        target=job.target, samples=rung, begun_with=start.target, states_engine=job.states.served.engine,
        learning_rate=job.recipe.learning_rate, dtype="float32",
    )  # fmt: skip


def _offline(job: TrainingJob, place: Workplace, rung: int) -> list[float]:
    there = place.at(rung=rung, part=place.parts - 1)
    return train.positions(train.read_metrics(train.finished(there)))


def _tokens(place: Workplace) -> float:
    rows = list(answers.rows(place.answers / "train.jsonl"))
    names = {row["conversation"] for row in rows}
    return sum(len(row["input_ids"]) for row in rows) / max(1, len(names))
