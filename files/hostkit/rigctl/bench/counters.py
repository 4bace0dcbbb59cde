"""What an engine says of itself: counters before and after a window, gauges during it.

Names as vLLM 0.16 to 0.33 and SGLang 0.5.9 to 0.5.23 export them (engines.md, section 5).
"""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

import requests
from prometheus_client.parser import text_string_to_metric_families

from rigctl.contract.sweep import Counters, Gpu, Observed
from rigctl.nvidia_smi import nvidia_smi
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.listening import StrangerAnswers
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
GPU_MEANS = ("power_w", "clock_mhz", "memory_mib")


class MetricsWrong(Exception):
    """What an engine says of itself cannot be, or lacks what a result needs. Says what."""


@dataclass
class Reading:
    """One reading of /metrics: values by our names; by_position: accepted drafts."""

    values: dict[str, float] = field(default_factory=dict)
    by_position: dict[int, float] = field(default_factory=dict)


def read(engine: Engine) -> Reading:
    """Read counters and gauges. Raises requests.RequestException when the engine does not answer; MetricsWrong."""
    kind = engine.specification.engine
    names = {name: key for key, name in {**COUNTERS[kind], **GAUGES[kind]}.items()}
    reading, text = Reading(), engine.metrics_text()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name not in names and sample.name != POSITIONS:
                    continue
                if not 0 <= sample.value < math.inf:
                    raise ValueError(f"{sample.name} is {sample.value}")
                if sample.name in names:
                    key = names[sample.name]
                    reading.values[key] = reading.values.get(key, 0) + sample.value
                else:
                    position = int(sample.labels["position"])
                    reading.by_position[position] = reading.by_position.get(position, 0) + sample.value
    except (ValueError, KeyError) as error:
        raise MetricsWrong(f"the engine's /metrics cannot be right: {error}") from None
    return reading


def window(before: Reading, after: Reading, specification: Specification, answers: int) -> Counters:
    """Counters of the window between two readings. answers: how many the client received.

    SGLang counts verifications only: accepted drafts are what it generated beyond one token a verification and the one
    of each prefill. Raises MetricsWrong when the engine does not count what it generates.
    """
    engine = specification.engine
    steps = specification.speculation.steps if specification.speculation else None
    moved = {key: int(after.values[key] - before.values.get(key, 0)) for key in COUNTERS[engine] if key in after.values}
    if "generated_tokens" not in moved:
        raise MetricsWrong(
            f"the engine exports no {COUNTERS[engine]['generated_tokens']}: its answers cannot be compared with a count"
        )
    verified = moved.pop("verify_calls", None)
    answers = moved.pop("requests", answers)
    if verified and steps:
        accepted = max(0, moved["generated_tokens"] - answers - verified)
        moved |= {"drafts": verified, "drafted": verified * steps, "accepted": min(accepted, verified * steps)}
    own_rate = after.values.get("own_rate") if steps else None
    if engine == "vllm":
        own_rate = moved["accepted"] / moved["drafted"] if moved.get("drafted") and "accepted" in moved else None
    positions = [int(after.by_position[p] - before.by_position.get(p, 0)) for p in sorted(after.by_position)]
    return Counters(**moved, accepted_at=positions, own_rate=own_rate)


def went_back(before: Reading, after: Reading, engine: str) -> bool:
    """True when a counter fell: the engine was started anew in between."""
    return any(after.values.get(key, 0) < before.values.get(key, 0) for key in COUNTERS[engine])


class Observer:
    """Samples gauges (and GPUs) in a thread while a window is measured."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._samples: list[Mapping[str, float]] = []
        self._gpus: list[list[Gpu]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            try:
                self._samples.append(read(self._engine).values)
            except (requests.RequestException, StrangerAnswers, MetricsWrong):
                continue  # the round itself tells when the engine is gone, or its metrics are wrong
            if gpus := gpu_state():
                self._gpus.append(gpus)

    def summary(self) -> Observed:
        """The gauges over the window."""
        running, waiting, use = (
            [sample[name] for sample in self._samples if name in sample] for name in ("running", "waiting", "kv_use")
        )
        lengths = [one["own_length"] for one in self._samples if one.get("own_length") and one.get("running")]
        return Observed(
            samples=len(self._samples),
            running_max=max(running, default=None),
            running_mean=fmean(running) if running else None,
            waiting_max=max(waiting, default=None),
            waiting_mean=fmean(waiting) if waiting else None,
            kv_use_max=max(use, default=None),
            own_length_mean=fmean(lengths) if lengths else None,
            gpus=[
                Gpu(name=card[0].name, **{key: round(fmean(getattr(gpu, key) for gpu in card), 1) for key in GPU_MEANS})
                for card in zip(*self._gpus, strict=False)
            ],
        )


def gpu_state() -> list[Gpu]:
    """Power (W), SM clock (MHz) and memory (MiB) of every GPU; empty where there is none."""
    found: list[Gpu] = []
    for row in nvidia_smi(f"--query-gpu={GPU_QUERY}"):
        try:
            index, name, *numbers = row
            power, clock, memory = (float(number) for number in numbers)
        except ValueError:
            continue  # a card that reports [N/A]
        found.append(Gpu(name=f"{index} {name}", power_w=power, clock_mhz=clock, memory_mib=memory))
    return found


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
