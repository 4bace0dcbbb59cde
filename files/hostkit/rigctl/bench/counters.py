"""What an engine says of itself: counters before and after a window, gauges during it.

Names as vLLM 0.16 to 0.33 and SGLang 0.5.9 to 0.5.23 export them (engines.md, section 5).
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.specification import Specification

COUNTERS = {
    "vllm": {
        "generated_tokens": "vllm:generation_tokens_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "preemptions": "vllm:num_preemptions_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    },
    "sglang": {
        "generated_tokens": "sglang:generation_tokens_total",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "requests": "sglang:num_requests_total",
        "preemptions": "sglang:num_retracted_requests_total",
        "verify_calls": "sglang:spec_verify_calls_total",
    },
}
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GAUGES = {
    "vllm": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_use": "vllm:kv_cache_usage_perc",
    },
    "sglang": {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv_use": "sglang:token_usage",
        "own_length": "sglang:spec_accept_length",
        "own_rate": "sglang:spec_accept_rate",
    },
}
SAMPLE_SECONDS = 0.5
GPU_QUERY = "index,name,power.draw,clocks.sm,memory.used"


@dataclass
class Reading:
    """One reading of /metrics: values by our names; by_position: accepted drafts."""

    values: dict[str, float] = field(default_factory=dict)
    by_position: dict[int, float] = field(default_factory=dict)


def read(engine: Engine) -> Reading:
    """Read counters and gauges. Raises requests.RequestException when the engine does not answer."""
    kind = engine.specification.engine
    names = {name: key for key, name in {**COUNTERS[kind], **GAUGES[kind]}.items()}
    reading = Reading()
    for family in text_string_to_metric_families(engine.metrics_text()):
        for sample in family.samples:
            if sample.name in names:
                key = names[sample.name]
                reading.values[key] = reading.values.get(key, 0) + sample.value
            elif sample.name == POSITIONS:
                position = int(sample.labels["position"])
                reading.by_position[position] = reading.by_position.get(position, 0) + sample.value
    return reading


@dataclass(frozen=True)
class Received:
    """What the client received in a window."""

    tokens: int
    answers: int


def window(before: Reading, after: Reading, specification: Specification, received: Received) -> dict[str, Any]:
    """Counters of the window between two readings, as the ledger has them.

    SGLang counts verifications only: accepted drafts are what it generated beyond one token a verification and the one
    of each prefill.
    """
    engine = specification.engine
    steps = specification.speculation.steps if specification.speculation else None
    moved = {key: after.values[key] - before.values.get(key, 0) for key in COUNTERS[engine] if key in after.values}
    verified = moved.pop("verify_calls", None)
    answers = moved.pop("requests", received.answers)
    if verified and steps:
        generated = moved.get("generated_tokens", received.tokens)
        moved |= {"drafts": verified, "drafted": verified * steps, "accepted": max(0.0, generated - answers - verified)}
    counted: dict[str, Any] = {key: int(value) for key, value in moved.items()}
    positions = sorted(after.by_position)
    counted["accepted_at"] = [int(after.by_position[p] - before.by_position.get(p, 0)) for p in positions]
    if engine == "vllm" and counted.get("drafted"):
        counted["own_rate"] = counted["accepted"] / counted["drafted"]
    elif steps and "own_rate" in after.values:
        counted["own_rate"] = after.values["own_rate"]
    return counted


def went_back(before: Reading, after: Reading, engine: str) -> bool:
    """True when a counter fell: the engine was started anew in between."""
    return any(after.values.get(key, 0) < before.values.get(key, 0) for key in COUNTERS[engine])


class Observer:
    """Samples gauges (and GPUs) in a thread while a window is measured."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._samples: list[Mapping[str, float]] = []
        self._gpus: list[list[dict[str, float | str]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            try:
                self._samples.append(read(self._engine).values)
            except requests.RequestException:
                continue  # the round itself tells when the engine is gone
            if gpus := gpu_state():
                self._gpus.append(gpus)

    def summary(self) -> dict[str, Any]:
        """The gauges as the ledger has them."""
        seen: dict[str, Any] = {"samples": len(self._samples)}
        for name in ("running", "waiting"):
            values = [sample[name] for sample in self._samples if name in sample]
            if values:
                seen |= {f"{name}_max": max(values), f"{name}_mean": fmean(values)}
        use = [sample["kv_use"] for sample in self._samples if "kv_use" in sample]
        if use:
            seen["kv_use_max"] = max(use)
        lengths = [
            sample["own_length"] for sample in self._samples if sample.get("own_length") and sample.get("running")
        ]
        if lengths:
            seen["own_length_mean"] = fmean(lengths)
        seen["gpus"] = [_mean_gpu(list(samples)) for samples in zip(*self._gpus, strict=False)]
        return seen


def gpu_state() -> list[dict[str, float | str]]:
    """Power (W), SM clock (MHz) and memory (MiB) of every GPU; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    found: list[dict[str, float | str]] = []
    for line in result.stdout.splitlines() if result.returncode == 0 else []:
        index, name, *numbers = [part.strip() for part in line.split(",")]
        try:
            power, clock, memory = (float(number) for number in numbers)
        except ValueError:
            continue  # a card that reports [N/A]
        found.append({"name": f"{index} {name}", "power_w": power, "clock_mhz": clock, "memory_mib": memory})
    return found


def _mean_gpu(samples: list[dict[str, float | str]]) -> dict[str, float | str]:
    mean: dict[str, float | str] = {"name": samples[0]["name"]}
    for key in ("power_w", "clock_mhz", "memory_mib"):
        mean[key] = round(fmean(float(sample[key]) for sample in samples), 1)
    return mean


def wait_idle(engine: Engine, seconds: float) -> Reading:
    """The first reading with nothing running or waiting, and counters at rest. Raises TimeoutError."""
    until = time.monotonic() + seconds
    last = read(engine)
    while True:
        time.sleep(SAMPLE_SECONDS)
        now = read(engine)
        busy = now.values.get("running", 0) or now.values.get("waiting", 0)
        if not busy and all(
            now.values.get(key) == last.values.get(key) for key in COUNTERS[engine.specification.engine]
        ):
            return now
        if time.monotonic() > until:
            raise TimeoutError(f"{busy:g} requests still ran after {seconds:.0f} s")
        last = now
