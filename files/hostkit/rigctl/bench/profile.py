"""AllReduce's share of GPU time while decoding, from the engine's own torch profiler.

The window holds each stream's short prompt and PROFILED_TOKENS tokens of its answer, so nearly all of it is decoding.
A rank that waits for another one does so in its AllReduce, and that time counts.
"""

import gzip
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, BinaryIO

import requests
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rigctl.contract.foreign import one_line
from rigctl.contract.order import faults
from rigctl.guarded import Place, regular
from rigctl.supervisor.engine_client import Engine

BELOW = "profile"
"""Where a profiled configuration writes, in its cache directory."""
TRACE_BYTES, EVENTS = 1 << 30, 4_000_000
"""Of one rank's trace, unpacked: it has 300 bytes a kernel, and PROFILED_TOKENS steps of a large model are 100 MB."""
# NCCL's kernels, the engines' own (custom, one-shot, quick) and FlashInfer's fused ones.
ALL_REDUCE = re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)
WRITING_SECONDS = 120
POLL_SECONDS = 2.0
PROFILED_TOKENS = 128  # a token is a step of each layer's kernels, on every rank
# What a profile of SGLang holds; by default it has Python's stacks too, and hundreds of steps fill gigabytes. vLLM is
# told by its command line.
RECORDED = {"activities": ["GPU"], "with_stack": False, "record_shapes": False}


class ProfileFailed(Exception):
    """The engine cannot be profiled. Says why."""


class Kernel(BaseModel):
    """An event of a trace; `dur` in microseconds."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    cat: str | None = None
    name: str = ""
    dur: float | None = Field(None, ge=0)


class Trace(BaseModel):
    """What is read of a trace: any bytes, since the engine wrote them."""

    model_config = ConfigDict(extra="ignore", strict=True)

    events: list[Kernel] = Field(alias="traceEvents", max_length=EVENTS)


def start(engine: Engine) -> None:
    """Start the engine's profiler. Raises ProfileFailed when it has none."""
    _post(engine, "start_profile", RECORDED if engine.specification.engine == "sglang" else None)


def stop(engine: Engine) -> dict[str, float]:
    """Stop the profiler, read what it wrote, delete it. Raises ProfileFailed without traces or GPU kernels."""
    _post(engine, "stop_profile")
    cache = engine.specification.cache
    try:
        _await_finished(cache)
        return shares(_traces(cache))
    except OSError as error:
        raise ProfileFailed(f"{error.filename or cache}: {error.strerror}") from None
    finally:
        _sweep(cache)


def _post(engine: Engine, what: str, content: dict[str, Any] | None = None) -> None:
    try:
        engine.post(what, content, timeout=WRITING_SECONDS)
    except requests.RequestException as error:
        raise ProfileFailed(f"{what}: {error}") from None


def _listed(cache: Place) -> Iterator[tuple[int, str]]:
    """The traces as (descriptor of their directory, name)."""
    return ((at, name) for at, name in cache.walk(BELOW) if name.endswith((".json", ".json.gz")))


def _await_finished(cache: Place) -> None:
    """Return once no trace grows any more."""
    until = time.monotonic() + WRITING_SECONDS
    before: list[tuple[str, int]] = []
    while time.monotonic() < until:
        now = [(name, os.stat(name, dir_fd=at, follow_symlinks=False).st_size) for at, name in _listed(cache)]
        if now and now == before:
            return
        before = now
        time.sleep(POLL_SECONDS)
    raise ProfileFailed(f"no trace appeared in {cache}/{BELOW}")


def _traces(cache: Place) -> Iterator[list[Kernel]]:
    """The kernels of each trace."""
    for at, name in _listed(cache):
        with regular(at, name, f"{cache}/{BELOW}: {name}") as file:
            yield kernels(file, name)


def _sweep(cache: Place) -> None:
    """Remove the traces, by the names that they have in directories reached without a link."""
    with suppress(OSError):
        for at, name in _listed(cache):
            os.unlink(name, dir_fd=at)


def kernels(file: BinaryIO, name: str) -> list[Kernel]:
    """The GPU kernels of one trace. Raises ProfileFailed."""
    try:
        with gzip.open(file) if name.endswith(".gz") else nullcontext(file) as trace:
            content = trace.read(TRACE_BYTES + 1) or b""
        if len(content) > TRACE_BYTES:
            raise ProfileFailed(f"{name} is longer than {TRACE_BYTES >> 20} MiB")
        events = Trace.model_validate_json(content).events
    except ValidationError as error:
        raise ProfileFailed(f"{name} is no trace: {one_line(next(iter(faults(error, Trace, None))))}") from None
    except (zlib.error, EOFError, gzip.BadGzipFile):
        raise ProfileFailed(f"{name} is no trace") from None
    return [event for event in events if event.cat == "kernel" and event.dur is not None]


def shares(traces: Iterable[list[Kernel]]) -> dict[str, float]:
    """GPU seconds of all kernels and AllReduce's share of them, over the traces of all ranks."""
    total = reduce = 0.0
    for kernels in traces:
        total += sum(kernel.dur or 0.0 for kernel in kernels)
        reduce += sum(kernel.dur or 0.0 for kernel in kernels if ALL_REDUCE.search(kernel.name))
    if not total:
        raise ProfileFailed("the traces hold no GPU kernels")
    return {"all_reduce_share": reduce / total, "kernel_seconds": total / 1e6}
