"""The load: NVIDIA's aiperf as the client that measures, plain threads for the warm-up, which nobody measures."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Annotated, Any, Self, TypeVar

import psutil
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rigctl import builder
from rigctl.contract.order import words
from rigctl.contract.sweep import Distribution, Round, Workload
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.specification import Specification

KEY_VARIABLE = "KIMI_RIG_API_KEY"
# aiperf wants a tokenizer even when it counts with the server's numbers; the model's own would run its remote code.
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"},
}
LAST_LINES = 12
LOOK_SECONDS = 0.1
# aiperf 0.13's phase `concurrency` looks for a free stream without pause, on a core of its own (timing/intervals.py,
# ConcurrencyBurst), which an engine beside it misses; `constant` looks this often. Also the most requests a second.
LOOKS_A_SECOND = 1000
TOKENS_A_PIECE = 8  # more than a speculative step gives


class LoadFailed(Exception):
    """The load generator did not finish, or what it or the engine answered cannot be: says what."""


def _metric(name: str) -> Any:
    return Field(validation_alias=AliasPath("metrics", name, "value"))


# Wide limits: what lies beyond comes from two clocks, or from no clock.
Milliseconds = Annotated[float, Field(ge=0, lt=1e10, allow_inf_nan=False)]
Nanoseconds = Annotated[int, Field(ge=0, lt=2**63)]
Tokens = Annotated[float, Field(ge=1, lt=1e9, multiple_of=1, allow_inf_nan=False)]


class Answer(BaseModel):
    """One answered request of aiperf's export, with everything that a round needs of it."""

    model_config = ConfigDict(strict=True, frozen=True)

    start: Nanoseconds = Field(validation_alias=AliasPath("metadata", "request_start_ns"))
    end: Nanoseconds = Field(validation_alias=AliasPath("metadata", "request_end_ns"))
    first: Milliseconds = _metric("time_to_first_token")
    latency: Milliseconds = _metric("request_latency")
    tokens: Tokens = _metric("usage_completion_tokens")
    prompt_tokens: Tokens = _metric("usage_prompt_tokens")
    pieces: Tokens | None = Field(None, validation_alias=AliasPath("metrics", "http_req_chunks_received", "value"))

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end <= self.start or self.latency == 0 or self.first > self.latency:
            raise ValueError("it ended before it began, took no time, or its first token came after its last")
        return self

    @property
    def gap(self) -> float:
        """Mean milliseconds between the tokens."""
        return (self.latency - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def speed(self) -> float:
        """Tokens a second after the first; of the whole answer where it was received in a few pieces: the generator did
        not get to run in between (an engine on CPU fills all cores), and when the first token came is not known."""
        if (self.pieces or self.tokens) * TOKENS_A_PIECE < self.tokens:
            return 1000 * self.tokens / self.latency
        return 1000 / self.gap if self.gap > 0 else 0.0


Model = TypeVar("Model", bound=BaseModel)


class _Record(BaseModel):
    error: Any = None


class _Summary(BaseModel):
    aiperf_version: Annotated[str, Field(min_length=1)]


def parameters(workload: Workload) -> dict[str, Any]:
    """What every request of a workload carries besides its prompt."""
    return {
        "max_tokens": workload.output_tokens,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "ignore_eos": workload.ignore_eos,
        "seed": workload.seed,
    }


def configuration(
    workload: Workload, specification: Specification, directory: Path, *, key: bool, seconds: float
) -> dict[str, Any]:
    """aiperf's configuration of one round; the API key comes from the environment, never from a file or argv."""
    return {
        "schemaVersion": "2.0",
        "randomSeed": workload.seed,
        "benchmark": {
            "model": specification.model,
            "endpoint": {
                "urls": [specification.base_url],
                "type": "chat",
                "streaming": True,
                "timeout": seconds,
                "use_server_token_count": True,
                "use_legacy_max_tokens": True,
                "extra": parameters(workload),
                **({"api_key": f"${{{KEY_VARIABLE}}}"} if key else {}),
            },
            "dataset": {
                "type": "file",
                "path": str(directory / "prompts.jsonl"),
                "format": "single_turn",
                "sampling": "sequential",
            },
            "phases": {
                "type": "constant",
                "rate": LOOKS_A_SECOND,
                "concurrency": workload.concurrency,
                "requests": workload.requests,
            },
            "tokenizer": {"name": str(directory / "tokenizer")},
            "artifacts": {"dir": str(directory / "out")},
            # Client processes: a quarter of the cores, at least four, never more than there are streams.
            "runtime": {"ui": "none", "workers": min(workload.concurrency, max(4, (os.cpu_count() or 1) // 4))},
            "gpu_telemetry": {"enabled": False},
            "server_metrics": {"enabled": False},
        },
    }


@dataclass(frozen=True)
class Generator:
    """The load generator. program: its path; seconds: limit of one request."""

    program: str
    seconds: float

    def measure(self, workload: Workload, engine: Engine, prompts: Iterable[str], directory: Path) -> tuple[Round, str]:
        """One round as its clients saw it, and the load generator with its version.

        Raises LoadFailed; StrangerAnswers; OSError when the directory cannot be written.
        """
        _lay_out(directory, prompts)
        config = configuration(workload, engine.specification, directory, key=bool(engine.key), seconds=self.seconds)
        (directory / "aiperf.json").write_text(json.dumps(config), encoding="utf-8")
        out = builder.handed_over(directory / "out")
        variables = {"HOME": str(out), "XDG_CACHE_HOME": str(out), "NO_PROXY": "*"}
        with builder.sandboxed(
            [self.program, "profile", "--config", directory / "aiperf.json"],
            unit="aiperf",
            writes=[out],
            network="loopback",
            environment={**variables, KEY_VARIABLE: engine.key} if engine.key else variables,
            properties=["KillSignal=SIGKILL"],
        ) as command:
            code, lines = _beside(engine, command)
        builder.publish(out)
        try:
            return parse(out, workload.requests)
        except OSError as error:
            last = [line.strip(" │╭╮╰╯─") for line in lines if "ERROR" in line or "Reason" in line] or lines
            said = "; ".join(line[:200] for line in last[-LAST_LINES:]) or repr(error)
            raise LoadFailed(f"aiperf ended with exit code {code}: {said}") from None


def _beside(engine: Engine, command: list[str]) -> tuple[int, list[str]]:
    """Run the load generator; its exit code and lines. It connects by itself, so with a key it ends as soon as the
    engine does: whoever takes the port then gets no request. Raises StrangerAnswers, requests.ConnectionError where
    the engine is not there."""
    listener = engine.prove() if engine.key else os.getpid()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            while psutil.pid_exists(listener):
                with suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(timeout=LOOK_SECONDS)
                    return process.returncode, said.decode(errors="replace").splitlines()
            raise LoadFailed("the engine ended during the round")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _lay_out(directory: Path, prompts: Iterable[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "tokenizer").mkdir(parents=True)
    for name, content in TOKENIZER.items():
        (directory / "tokenizer" / name).write_text(json.dumps(content), encoding="utf-8")
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"text": prompt}) + "\n")


def parse(directory: Path, requests: int) -> tuple[Round, str]:
    """aiperf's export of a round of so many requests, and aiperf's version.

    Raises OSError when it is absent; LoadFailed when a record is missing or cannot be, naming it.
    """
    summary = _valid(_Summary, (directory / "profile_export_aiperf.json").read_bytes(), "aiperf's summary")
    lines = (directory / "profile_export.jsonl").read_bytes().splitlines()
    answers: list[Answer] = []
    errors: list[Any] = []
    for number, line in enumerate(lines, 1):
        error = _valid(_Record, line, f"record {number}").error
        if error is not None:
            errors.append(error)
        else:
            answers.append(_valid(Answer, line, f"record {number}"))
    summed = sorted({str((isinstance(error, dict) and error.get("message")) or error)[:200] for error in errors})[:5]
    if not answers:
        raise LoadFailed(f"none of {len(lines)} requests was answered: {summed}")
    if len(lines) != requests:
        raise LoadFailed(f"aiperf recorded {len(lines)} of {requests} requests")
    seconds = (max(answer.end for answer in answers) - min(answer.start for answer in answers)) / 1e9
    output = int(sum(answer.tokens for answer in answers))
    measured = Round(
        seconds=seconds,
        requests=len(answers),
        errors=len(errors),
        error_summary=summed,
        prompt_tokens=int(sum(answer.prompt_tokens for answer in answers)),
        output_tokens=output,
        output_tok_s=output / seconds,
        stream_tok_s=median(answer.speed for answer in answers),
        ttft_ms=_distribution([answer.first for answer in answers]),
        itl_ms=_distribution([answer.gap for answer in answers]),
        e2e_ms=_distribution([answer.latency for answer in answers]),
    )
    return measured, f"aiperf {summary.aiperf_version}"


def _valid(model: type[Model], text: bytes, where: str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        found = ((".".join(map(str, one["loc"])), words(one, ())) for one in error.errors(include_url=False))
        said = "; ".join(": ".join(filter(None, fault)) for fault in found)
        raise LoadFailed(f"{where}: {said}") from None


def _distribution(values: list[float]) -> Distribution:
    cuts = quantiles(values * 2 if len(values) == 1 else values, n=100, method="inclusive")
    return Distribution(mean=fmean(values), p50=cuts[49], p90=cuts[89], p99=cuts[98])


def warm(engine: Engine, workload: Workload, prompts: Sequence[str], seconds: float) -> float:
    """Send prompts at the workload's concurrency; output tokens a second.

    Raises requests.RequestException; LoadFailed for an empty answer, or one that does not say how long it is.
    """

    def one(prompt: str) -> int:
        answer = engine.anew().completion(prompt, timeout=seconds, **parameters(workload))
        return _used(answer, "completion_tokens")

    begun = time.monotonic()
    with ThreadPoolExecutor(workload.concurrency) as pool:
        tokens = sum(pool.map(one, prompts))
    return tokens / (time.monotonic() - begun)


def _used(answer: Any, name: str) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get(name) if isinstance(usage, dict) else None
    if type(count) is not int or count < 1:
        raise LoadFailed(f"an answer without its number of tokens ({name} is {count!r}): {str(answer)[:200]}")
    return count


def tokens_a_word(engine: Engine, words: Sequence[str], seconds: float) -> float:
    """Measure how many tokens a filler word is to this engine's tokenizer.

    Raises requests.RequestException; LoadFailed for an answer that does not say how long its prompt was.
    """
    prompts = (" ".join(islice(cycle(words), amount)) for amount in (20, 120))
    answers = (engine.completion(prompt, timeout=seconds, max_tokens=1) for prompt in prompts)
    few, many = (_used(answer, "prompt_tokens") for answer in answers)
    return max((many - few) / 100, 0.25)
