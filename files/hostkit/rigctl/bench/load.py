"""The load: NVIDIA's aiperf as the client that measures, plain threads for the warm-up, which nobody measures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rigctl.bench.plan import Workload
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
# aiperf 0.13's phase `concurrency` looks for a free stream without pause, on a core of its own (timing/intervals.py,
# ConcurrencyBurst), which an engine beside it misses; `constant` looks this often. Also the most requests a second.
LOOKS_A_SECOND = 1000
TOKENS_A_PIECE = 8  # more than a speculative step gives


class LoadFailed(Exception):
    """The load generator did not finish. Says what it said last."""


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
            "runtime": {"ui": "none", "workers": workers(workload.concurrency)},
            "gpu_telemetry": {"enabled": False},
            "server_metrics": {"enabled": False},
        },
    }


def workers(concurrency: int) -> int:
    """Client processes: a quarter of the cores, at least four, never more than there are streams."""
    return max(1, min(concurrency, max(4, (os.cpu_count() or 1) // 4)))


@dataclass(frozen=True)
class Generator:
    """The load generator. program: its path; seconds: limit of one request."""

    program: str
    key: str | None
    seconds: float

    def measure(
        self, workload: Workload, specification: Specification, prompts: Iterable[str], directory: Path
    ) -> dict[str, Any]:
        """One round: seconds, tokens, latencies as the ledger has them.

        Raises LoadFailed; OSError when the directory cannot be written.
        """
        _lay_out(directory, prompts)
        config = configuration(workload, specification, directory, key=self.key is not None, seconds=self.seconds)
        (directory / "aiperf.json").write_text(json.dumps(config), encoding="utf-8")
        environment = {**os.environ, "HOME": str(directory), "XDG_CACHE_HOME": str(directory), "NO_PROXY": "*"}
        if self.key:
            environment[KEY_VARIABLE] = self.key
        # aiperf leaves directories there; in ours the paths of its sockets would be too long.
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            result = subprocess.run(
                [self.program, "profile", "--config", str(directory / "aiperf.json")],
                cwd=directory,
                env={**environment, "TMPDIR": scratch},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        try:
            return parse(directory / "out")
        except (OSError, ValueError, KeyError) as error:
            last = [line.strip(" │╭╮╰╯─") for line in result.stdout.splitlines() if "ERROR" in line or "Reason" in line]
            said = "; ".join(line[:200] for line in last[-LAST_LINES:]) or repr(error)
            raise LoadFailed(f"aiperf ended with exit code {result.returncode}: {said}") from None


def _lay_out(directory: Path, prompts: Iterable[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "tokenizer").mkdir(parents=True)
    for name, content in TOKENIZER.items():
        (directory / "tokenizer" / name).write_text(json.dumps(content), encoding="utf-8")
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"text": prompt}) + "\n")


def parse(directory: Path) -> dict[str, Any]:
    """aiperf's export as one round. Raises OSError, ValueError, KeyError when it is not whole."""
    summary = json.loads((directory / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (directory / "profile_export.jsonl").read_text().splitlines()]
    good = [record for record in records if not record.get("error")]
    if not good:
        raise ValueError(f"none of {len(records)} requests was answered: {_errors(records)}")
    starts = [record["metadata"]["request_start_ns"] for record in good]
    ends = [record["metadata"]["request_end_ns"] for record in good]
    seconds = (max(ends) - min(starts)) / 1e9
    output = sum(int(_value(record, "usage_completion_tokens")) for record in good)
    return {
        "seconds": seconds,
        "requests": len(good),
        "errors": len(records) - len(good),
        "error_summary": _errors(records),
        "prompt_tokens": sum(int(_value(record, "usage_prompt_tokens")) for record in good),
        "output_tokens": output,
        "output_tok_s": output / seconds,
        "stream_tok_s": median(_stream_speed(record) for record in good),
        "ttft_ms": _distribution([_value(record, "time_to_first_token") for record in good]),
        "itl_ms": _distribution([_gap(record) for record in good]),
        "e2e_ms": _distribution([_value(record, "request_latency") for record in good]),
        "generator": f"aiperf {summary['aiperf_version']}",
    }


def _value(record: dict[str, Any], name: str) -> float:
    return float(record["metrics"][name]["value"])


def _gap(record: dict[str, Any]) -> float:
    """Mean milliseconds between the tokens of one answer."""
    tokens = _value(record, "usage_completion_tokens")
    after_first = _value(record, "request_latency") - _value(record, "time_to_first_token")
    return after_first / (tokens - 1) if tokens > 1 else 0.0


def _stream_speed(record: dict[str, Any]) -> float:
    """Tokens a second after the first; of the whole answer where it was received in a few pieces: the generator did not
    get to run in between (an engine on CPU fills all cores), and when the first token came is not known."""
    tokens, gap = _value(record, "usage_completion_tokens"), _gap(record)
    pieces = record["metrics"].get("http_req_chunks_received", {}).get("value", tokens)
    if pieces * TOKENS_A_PIECE < tokens:
        return 1000 * tokens / _value(record, "request_latency")
    return 1000 / gap if gap > 0 else 0.0


def _distribution(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def quantile(share: float) -> float:
        """Linear between the two nearest ranks."""
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "p50": quantile(0.5), "p90": quantile(0.9), "p99": quantile(0.99)}


def _errors(records: Sequence[dict[str, Any]]) -> list[str]:
    said = {
        str((record["error"] or {}).get("message") or record["error"])[:200]
        for record in records
        if record.get("error")
    }
    return sorted(said)[:5]


def warm(
    specification: Specification, key: str | None, workload: Workload, prompts: Sequence[str], seconds: float
) -> float:
    """Send prompts at the workload's concurrency; output tokens a second.

    Raises requests.RequestException; LoadFailed for an answer that does not say how long it is.
    """

    def one(prompt: str) -> int:
        # A connection of its own: sessions are not made for threads.
        answer = Engine(specification, key).completion(prompt, timeout=seconds, **parameters(workload))
        try:
            return int(answer["usage"]["completion_tokens"])
        except (KeyError, TypeError, ValueError):
            raise LoadFailed(f"an answer without its number of tokens: {str(answer)[:200]}") from None

    begun = time.monotonic()
    with ThreadPoolExecutor(workload.concurrency) as pool:
        tokens = sum(pool.map(one, prompts))
    return tokens / (time.monotonic() - begun)


def tokens_a_word(engine: Engine, words: Sequence[str], seconds: float) -> float:
    """Measure how many tokens a filler word is to this engine's tokenizer. Raises requests.RequestException."""
    counts = []
    for amount in (20, 120):
        answer = engine.completion(
            " ".join(words[i % len(words)] for i in range(amount)), timeout=seconds, max_tokens=1
        )
        counts.append(int(answer["usage"]["prompt_tokens"]))
    return max((counts[1] - counts[0]) / 100, 0.25)
