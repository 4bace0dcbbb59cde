"""AllReduce's share of GPU time while decoding, from the engine's own torch profiler.

The window holds each stream's short prompt and PROFILED_TOKENS tokens of its answer, so nearly all of it is decoding.
A rank that waits for another one does so in its AllReduce, and that time counts.
"""

import gzip
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import requests

from rigctl.supervisor.engine_client import Engine

CACHE = Path("/var/cache/kimi-rig")  # a profiled configuration writes to <name>/profile below it
# NCCL's kernels, the engines' own (custom, one-shot, quick) and FlashInfer's fused ones.
ALL_REDUCE = re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)
WRITING_SECONDS = 120
PROFILED_TOKENS = 128  # a token is a step of each layer's kernels, on every rank
# What a profile of SGLang holds; by default it has Python's stacks too, and hundreds of steps fill gigabytes. vLLM is
# told by its command line.
RECORDED = {"activities": ["GPU"], "with_stack": False, "record_shapes": False}


class ProfileFailed(Exception):
    """The engine cannot be profiled. Says why."""


def start(engine: Engine) -> None:
    """Start the engine's profiler. Raises ProfileFailed when it has none."""
    _post(engine, "start_profile", RECORDED if engine.specification.engine == "sglang" else None)


def stop(engine: Engine, directory: Path) -> dict[str, float]:
    """Stop the profiler, read what it wrote, delete it. Raises ProfileFailed without traces or GPU kernels."""
    _post(engine, "stop_profile")
    paths = _finished(directory)
    try:
        return shares(_kernels(path) for path in paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _post(engine: Engine, what: str, content: dict[str, Any] | None = None) -> None:
    try:
        engine.post(what, content, timeout=WRITING_SECONDS)
    except requests.RequestException as error:
        raise ProfileFailed(f"{what}: {error}") from None


def _finished(directory: Path) -> list[Path]:
    """The traces, once none of them grows any more."""
    until = time.monotonic() + WRITING_SECONDS
    before: dict[Path, int] = {}
    while time.monotonic() < until:
        found = [*directory.rglob("*.json"), *directory.rglob("*.json.gz")]
        now = {path: path.stat().st_size for path in found}
        if now and now == before:
            return sorted(now)
        before = now
        time.sleep(2)
    raise ProfileFailed(f"no trace appeared in {directory}")


def _kernels(path: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        events = json.loads(content)["traceEvents"]
    except (ValueError, KeyError):
        raise ProfileFailed(f"{path} is no trace") from None
    return [event for event in events if event.get("cat") == "kernel" and "dur" in event]


def shares(traces: Iterable[list[dict[str, Any]]]) -> dict[str, float]:
    """GPU seconds of all kernels and AllReduce's share of them, over the traces of all ranks."""
    total = reduce = 0.0
    for kernels in traces:
        total += sum(float(kernel["dur"]) for kernel in kernels)
        reduce += sum(float(kernel["dur"]) for kernel in kernels if ALL_REDUCE.search(kernel["name"]))
    if not total:
        raise ProfileFailed("the traces hold no GPU kernels")
    return {"all_reduce_share": reduce / total, "kernel_seconds": total / 1e6}
