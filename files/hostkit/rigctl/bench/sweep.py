"""One sweep: for each configuration start it, wait until it is accepted, warm up, measure every cell, stop it.

Each finished cell is a file of its own, so an interrupted sweep goes on where it ended. A cell that fails is a result
too: it says why, and the sweep goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import requests

from rigctl.bench import counters, load, profile
from rigctl.bench.plan import Plan, Workload, read_plan
from rigctl.bench.prompts import WORDS, requests_of
from rigctl.errors import RigctlError
from rigctl.supervisor.engine_client import Engine, api_key
from rigctl.supervisor.measurement_pause import undisturbed
from rigctl.supervisor.specification import Specification, installed, named

IDLE_SECONDS = 60
# A round's prompts and records at the largest loads; below this the disk is as good as full.
FREE_BYTES = 200 * 1024**2
CAUSE_LINES = 5
SETTLED_SECONDS = 120  # for a unit that is still stopping to say why
SAID_LETTERS = 160


class CellFailed(Exception):
    """A cell cannot be measured. Says why."""


class NotAccepted(CellFailed):
    """The configuration does not start: none of its cells can be measured. A start may take half an hour."""


@dataclass
class Progress:
    """What is done, and how long the rest will take by what the last ones took."""

    plan: Plan
    left: int
    starts_left: int
    cell_seconds: list[float] = field(default_factory=list)
    start_seconds: list[float] = field(default_factory=list)

    def say(self, text: str) -> None:
        """One line in the journal, which the deploy shows."""
        done = self.plan.size - self.left
        print(f"{done}/{self.plan.size} cells done{self._remaining()}; {text}", flush=True)

    def _remaining(self) -> str:
        if not self.cell_seconds:
            return ""
        starting = fmean(self.start_seconds) * self.starts_left if self.start_seconds else 0.0
        seconds = fmean(self.cell_seconds) * self.left + starting
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def run_sweep(path: Path) -> int:
    """Measure what is not measured yet. Raises RigctlError when the sweep itself cannot go on, or is stopped."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _run(read_plan(path))
    except KeyboardInterrupt:
        raise RigctlError("stopped; finished cells are kept, the next run goes on with the others") from None


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what follows puts the host back
    raise KeyboardInterrupt


def _run(plan: Plan) -> int:
    if not os.access(plan.generator, os.X_OK):
        raise RigctlError(f"{plan.generator} does not exist; run benchmark.py again")
    todo = {
        name: [plan.workloads[w] for w in workloads if not plan.result_path(name, w).exists()]
        for name, workloads in plan.cells.items()
    }
    todo = {name: workloads for name, workloads in todo.items() if workloads}
    progress = Progress(plan, sum(map(len, todo.values())), len(todo))
    before = [specification.unit for specification in installed() if _active(specification.unit)]
    progress.say("the sweep begins")
    try:
        for name, workloads in todo.items():
            _configuration(plan, named(name), workloads, progress)
    finally:
        if todo:
            _put_back(before)
    shutil.rmtree(plan.directory / "round", ignore_errors=True)
    progress.say("the sweep is complete")
    return 0


def _put_back(units: list[str]) -> None:
    """Start what ran before the sweep; `systemctl start` on what runs already does nothing."""
    for unit in units:
        subprocess.run(["systemctl", "start", "--no-block", unit], check=False)


def _configuration(plan: Plan, specification: Specification, workloads: list[Workload], progress: Progress) -> None:
    engine = Engine(specification, api_key())
    refused: NotAccepted | None = None
    order = 0
    try:
        for workload in workloads:
            begun = time.monotonic()
            try:
                if refused is not None:
                    raise refused
                if not _active(specification.unit):
                    progress.say(f"{specification.name}: starting")
                if _start(specification):
                    order = 0
                    progress.start_seconds.append(time.monotonic() - begun)
                    begun = time.monotonic()
                order += 1
                with _round_directory(plan) as directory:
                    result = _cell(plan, engine, workload, directory, progress)
                result["order"] = order
                progress.cell_seconds.append(time.monotonic() - begun)
            except CellFailed as error:
                refused = error if isinstance(error, NotAccepted) else refused
                result = {"status": "failed", "cause": str(error), "rounds": []}
                progress.say(f"{specification.name}, {workload.id}: FAILED: {str(error)[:SAID_LETTERS]}")
            _store(plan, specification, workload, result)
            progress.left -= 1
    finally:
        progress.starts_left -= 1
        progress.say(f"{specification.name}: stopping")
        subprocess.run(["systemctl", "stop", specification.unit], check=False)


def _start(specification: Specification) -> bool:
    """Start the unit unless it is active; True when it was started. Raises CellFailed when it is not accepted."""
    if _active(specification.unit):
        return False
    subprocess.run(["systemctl", "reset-failed", specification.unit], check=False, stderr=subprocess.DEVNULL)
    result = subprocess.run(["systemctl", "start", specification.unit], capture_output=True, text=True, check=False)
    if result.returncode != 0 or not _active(specification.unit):
        raise NotAccepted(f"it was not accepted: {_cause(specification)}")
    return True


def _active(unit: str) -> bool:
    return subprocess.run(["systemctl", "is-active", "--quiet", unit], check=False).returncode == 0


def _property(unit: str, name: str) -> str:
    command = ["systemctl", "show", "--value", f"--property={name}", unit]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _cause(specification: Specification) -> str:
    """Why a unit is not well: systemd's result, the supervisor's status, the last words."""
    unit = specification.unit
    until = time.monotonic() + SETTLED_SECONDS
    while _property(unit, "ActiveState") == "deactivating" and time.monotonic() < until:
        time.sleep(0.5)
    lines = subprocess.run(
        ["journalctl", "-q", "-o", "cat", "--lines=60", f"_SYSTEMD_UNIT={unit}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    state = f"{_property(unit, 'ActiveState')} ({_property(unit, 'Result')})"
    last = [line.strip()[:200] for line in lines if "GET /metrics" not in line][-CAUSE_LINES:]
    words = [_property(unit, "StatusText"), *last]
    return f"{unit} is {state}: " + " | ".join(word for word in words if word)


@contextmanager
def _round_directory(plan: Plan) -> Iterator[Path]:
    free = shutil.disk_usage(plan.directory).free
    if free < FREE_BYTES:
        raise RigctlError(
            f"{plan.directory} has {free // 1024**2} MiB free, {FREE_BYTES // 1024**2} are needed; "
            "finished cells are kept: make room and run the benchmark again"
        )
    directory = plan.directory / "round"
    try:
        yield directory
    except OSError as error:
        if isinstance(error, requests.RequestException):
            raise
        raise RigctlError(
            f"{directory}: {error.strerror or error}; finished cells are kept: make room and run the benchmark again"
        ) from None


def _cell(plan: Plan, engine: Engine, workload: Workload, directory: Path, progress: Progress) -> dict[str, Any]:
    specification = engine.specification
    name = f"{specification.name}, {workload.id}"
    invocation = _property(specification.unit, "InvocationID")
    texts = plan.prompts.get(workload.prompts, [])
    try:
        ratio = _calibrated(plan, engine, workload)
        progress.say(f"{name}: warming up")
        warmup_rounds, stable = _warm_up(plan, engine, workload, ratio)
        rounds: list[dict[str, Any]] = []
        for number in range(1, plan.settings.rounds + 1):
            progress.say(f"{name}: round {number} of {plan.settings.rounds}")
            prompts = requests_of(workload, texts, f"round {number}", ratio)
            rounds.append(_round(plan, engine, workload, prompts, directory))
        profiled = _profiled(plan, engine, workload, ratio, progress) if plan.settings.profile else {}
    except (requests.RequestException, load.LoadFailed, TimeoutError) as error:
        raise CellFailed(_explained(specification, invocation, error)) from None
    if _property(specification.unit, "InvocationID") != invocation or not _active(specification.unit):
        raise CellFailed(_explained(specification, invocation, None))
    return {
        "status": "measured",
        "cause": None,
        "warmup_rounds": warmup_rounds,
        "warmup_stable": stable,
        "rounds": rounds,
        "profile": profiled,
    }


def _explained(specification: Specification, invocation: str, error: Exception | None) -> str:
    """The cause of a failed cell: the engine's end first, if it ended."""
    said = f"{type(error).__name__}: {error}" if error is not None else "the measured rounds do not belong together"
    if not _active(specification.unit):
        return f"the engine ended while it was measured: {_cause(specification)} ({said[:300]})"
    if _property(specification.unit, "InvocationID") != invocation:
        return f"the engine was started anew while it was measured ({said[:300]})"
    return said[:600]


def _calibrated(plan: Plan, engine: Engine, workload: Workload) -> float:
    """Tokens a filler word is; measured once a sweep and model, so that every configuration gets the same prompts."""
    if not workload.context:
        return 1.0
    path = plan.directory / "calibration.json"
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    if engine.specification.model not in known:
        known[engine.specification.model] = load.tokens_a_word(engine, WORDS, plan.settings.request_seconds)
        _write(path, known)
    return known[engine.specification.model]


def _warm_up(plan: Plan, engine: Engine, workload: Workload, ratio: float) -> tuple[int, bool | None]:
    """Rounds until two in a row are equally fast. Returns how many, and whether they were (None: one was asked for)."""
    settings = plan.settings
    texts = plan.prompts.get(workload.prompts, [])
    speeds: list[float] = []
    while len(speeds) < settings.warmup_most:
        prompts = list(requests_of(workload, texts, f"warm-up {len(speeds)}", ratio, count=workload.concurrency))
        speeds.append(load.warm(engine.specification, api_key(), workload, prompts, settings.request_seconds))
        if len(speeds) >= max(2, settings.warmup_least) and _same(speeds[-2], speeds[-1], settings.tolerance):
            return len(speeds), True
    return len(speeds), False if len(speeds) > 1 else None


def _profiled(plan: Plan, engine: Engine, workload: Workload, ratio: float, progress: Progress) -> dict[str, float]:
    """AllReduce's share while the workload runs once more; empty, and told, where it cannot be had."""
    name = engine.specification.name
    texts = plan.prompts.get(workload.prompts, [])
    prompts = list(requests_of(workload, texts, "profile", ratio, count=workload.concurrency))
    tokens = min(workload.output_tokens, profile.PROFILED_TOKENS)
    short = replace(workload, output_tokens=tokens, ignore_eos=True)
    try:
        profile.start(engine)
        load.warm(engine.specification, api_key(), short, prompts, plan.settings.request_seconds)
        return profile.stop(engine, profile.trace_directory(name))
    except profile.ProfileFailed as error:
        progress.say(f"{name}, {workload.id}: not profiled: {error}")
        return {}


def _same(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(one, other)


def _round(plan: Plan, engine: Engine, workload: Workload, prompts: Iterator[str], directory: Path) -> dict[str, Any]:
    """One measured window, with the engine's counters over exactly this window."""
    specification = engine.specification
    with undisturbed(specification):
        before = counters.wait_idle(engine, IDLE_SECONDS)
        with counters.Observer(engine) as observer:
            generator = load.Generator(plan.generator, api_key(), plan.settings.request_seconds)
            measured = generator.measure(workload, specification, prompts, directory)
        after = counters.wait_idle(engine, IDLE_SECONDS)
    if counters.went_back(before, after, specification.engine):
        raise load.LoadFailed("the engine's counters fell: it was started anew during the round")
    received = counters.Received(measured["output_tokens"], measured["requests"])
    return {
        **measured,
        "counters": counters.window(before, after, specification, received),
        "observed": observer.summary(),
    }


def _store(plan: Plan, specification: Specification, workload: Workload, result: dict[str, Any]) -> None:
    content = {
        "configuration": specification.name,
        "workload": workload.id,
        "digest": specification.digest,
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **result,
    }
    _write(plan.result_path(specification.name, workload.id), content)


def _write(path: Path, content: Any) -> None:
    """Write JSON whole or not at all. Raises RigctlError when it cannot be written."""
    temporary = path.with_name(f".new-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RigctlError(
            f"{path} cannot be written: {error.strerror}; finished cells are kept: make room and run again"
        ) from None
