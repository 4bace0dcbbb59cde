"""One sweep: for each configuration start it, wait until it is accepted, warm up, measure every cell, stop it.

Each finished cell is a file of its own, so an interrupted sweep goes on where it ended. A cell that fails is a result
too: it says why, and the sweep goes on.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import requests

from rigctl.bench import counters, load, load_time, profile
from rigctl.bench.prompts import WORDS, requests_of
from rigctl.contract.order import ContractError
from rigctl.contract.sweep import CellResult, Round, Sweep, Workload, cell_file
from rigctl.errors import RigctlError
from rigctl.supervisor.engine_client import Engine, engine_of
from rigctl.supervisor.listening import StrangerAnswers
from rigctl.supervisor.measurement_pause import undisturbed
from rigctl.supervisor.specification import Specification, installed, named
from rigctl.whole_files import write_whole

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
class Run:
    """A sweep at work in its directory: what is left, and how long it will take by what the last ones took."""

    sweep: Sweep
    directory: Path
    left: int
    starts_left: int
    cell_seconds: list[float] = field(default_factory=list)
    start_seconds: list[float] = field(default_factory=list)

    def say(self, text: str) -> None:
        """One line in the journal, which the deploy shows."""
        cells = len(self.sweep.pairs)
        print(f"{cells - self.left}/{cells} cells done{self._remaining()}; {text}", flush=True)

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
        return _run(Sweep.read(path), path.parent)
    except KeyboardInterrupt:
        raise RigctlError("stopped; finished cells are kept, the next run goes on with the others") from None


def result_of(directory: Path, configuration: str, workload: str) -> CellResult | None:
    """The result of a cell, None before there is one. Raises ContractError when its file is not that result."""
    path = directory / cell_file(configuration, workload)
    if not path.exists():
        return None
    found = CellResult.read(path)
    if (found.configuration, found.workload) != (configuration, workload):
        raise ContractError(f"{path} is the result of {found.configuration}, {found.workload}")
    return found


def results(path: Path) -> Iterator[CellResult]:
    """Every finished cell of a sweep; one whose file is not its result is a failed cell, which says why."""
    for name, workload in Sweep.read(path).pairs:
        try:
            found = result_of(path.parent, name, workload)
        except ContractError as error:
            found = _failed(name, workload, "", str(error))
        if found is not None:
            yield found


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what follows puts the host back
    raise KeyboardInterrupt


def _is_measured(directory: Path, configuration: str, workload: str) -> bool:
    try:
        return result_of(directory, configuration, workload) is not None
    except ContractError:
        return False


def _run(sweep: Sweep, directory: Path) -> int:
    if not os.access(sweep.generator, os.X_OK):
        raise RigctlError(f"{sweep.generator} does not exist; run benchmark.py again")
    todo = {
        name: [w for w in sweep.workloads if w.id in listed and not _is_measured(directory, name, w.id)]
        for name, listed in sweep.cells.items()
    }
    todo = {name: workloads for name, workloads in todo.items() if workloads}
    run = Run(sweep, directory, sum(map(len, todo.values())), len(todo))
    before = [specification.unit for specification in installed() if _active(specification.unit)]
    run.say("the sweep begins")
    try:
        for name, workloads in todo.items():
            _configuration(run, named(name), workloads)
    finally:
        if todo:
            for unit in before:  # systemctl does nothing where it runs already
                subprocess.run(["systemctl", "start", "--no-block", unit], check=False)
    shutil.rmtree(directory / "round", ignore_errors=True)
    run.say("the sweep is complete")
    return 0


def _configuration(run: Run, specification: Specification, workloads: list[Workload]) -> None:
    engine = engine_of(specification)
    refused: NotAccepted | None = None
    loading: dict[str, float] = {}
    order = 0
    try:
        for workload in workloads:
            begun = time.monotonic()
            try:
                if refused is not None:
                    raise refused
                if not _active(specification.unit):
                    run.say(f"{specification.name}: starting")
                if run.sweep.load_time and not loading:
                    run.say(f"{specification.name}: starting, cold and warm")
                    loading = load_time.measure(
                        specification, partial(_start, specification), partial(_stop_unit, specification.unit)
                    )
                if _start(specification):
                    order = 0
                    run.start_seconds.append(time.monotonic() - begun)
                    begun = time.monotonic()
                order += 1
                with _round_directory(run) as directory:
                    measured = _cell(run, engine, workload, directory)
                result = _result(
                    specification.name, workload.id, specification.digest, order=order, load_times=loading, **measured
                )
                run.cell_seconds.append(time.monotonic() - begun)
            except (CellFailed, ContractError) as error:
                refused = error if isinstance(error, NotAccepted) else refused
                result = _failed(specification.name, workload.id, specification.digest, str(error))
                run.say(f"{specification.name}, {workload.id}: FAILED: {str(error)[:SAID_LETTERS]}")
            _write(run.directory / cell_file(specification.name, workload.id), result.text())
            run.left -= 1
    finally:
        run.starts_left -= 1
        run.say(f"{specification.name}: stopping")
        _stop_unit(specification.unit)


def _stop_unit(unit: str) -> None:
    subprocess.run(["systemctl", "stop", unit], check=False)


def _result(configuration: str, workload: str, digest: str, **found: Any) -> CellResult:
    """A result as of now. Raises ContractError when it cannot be."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    identity = {"format": CellResult.FORMAT, "configuration": configuration, "workload": workload, "digest": digest}
    return CellResult.parse({**identity, "at": at, **found}, f"{configuration}, {workload}")


def _failed(configuration: str, workload: str, digest: str, cause: str) -> CellResult:
    return _result(configuration, workload, digest, status="failed", cause=cause, generator=None, rounds=[])


def _start(specification: Specification) -> bool:
    """Start the unit unless it is active; True when it was started. Raises CellFailed when it is not accepted."""
    if _active(specification.unit):
        return False
    subprocess.run(["systemctl", "reset-failed", specification.unit], check=False, stderr=subprocess.DEVNULL)
    result = subprocess.run(
        ["systemctl", "start", specification.unit], capture_output=True, errors="replace", check=False
    )
    if result.returncode != 0 or not _active(specification.unit):
        raise NotAccepted(f"it was not accepted: {_cause(specification)}")
    return True


def _active(unit: str) -> bool:
    return subprocess.run(["systemctl", "is-active", "--quiet", unit], check=False).returncode == 0


def _property(unit: str, name: str) -> str:
    command = ["systemctl", "show", "--value", f"--property={name}", unit]
    return subprocess.run(command, capture_output=True, errors="replace", check=False).stdout.strip()


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
        errors="replace",
        check=False,
    ).stdout.splitlines()
    state = f"{_property(unit, 'ActiveState')} ({_property(unit, 'Result')})"
    last = [line.strip()[:200] for line in lines if "GET /metrics" not in line][-CAUSE_LINES:]
    words = [_property(unit, "StatusText"), *last]
    return f"{unit} is {state}: " + " | ".join(word for word in words if word)


@contextmanager
def _round_directory(run: Run) -> Iterator[Path]:
    free = shutil.disk_usage(run.directory).free
    if free < FREE_BYTES:
        raise RigctlError(
            f"{run.directory} has {free // 1024**2} MiB free, {FREE_BYTES // 1024**2} are needed; "
            "finished cells are kept: make room and run the benchmark again"
        )
    directory = run.directory / "round"
    try:
        yield directory
    except requests.RequestException:  # an OSError too, and the engine's
        raise
    except OSError as error:
        raise RigctlError(
            f"{directory}: {error.strerror or error}; finished cells are kept: make room and run the benchmark again"
        ) from None


def _cell(run: Run, engine: Engine, workload: Workload, directory: Path) -> dict[str, Any]:
    specification, sweep = engine.specification, run.sweep
    name = f"{specification.name}, {workload.id}"
    invocation = _property(specification.unit, "InvocationID")
    texts = sweep.prompts.get(workload.prompts, [])
    try:
        ratio = _calibrated(run, engine, workload)
        run.say(f"{name}: warming up")
        warmup_rounds, stable = _warm_up(run, engine, workload, ratio)
        rounds: list[Round] = []
        for number in range(1, sweep.rounds + 1):
            run.say(f"{name}: round {number} of {sweep.rounds}")
            prompts = requests_of(workload, texts, f"round {number}", ratio)
            measured, generator = _round(run, engine, workload, prompts, directory)
            rounds.append(measured)
        profiled = _profiled(run, engine, workload, ratio) if sweep.profile else {}
    except (requests.RequestException, StrangerAnswers, load.LoadFailed, counters.MetricsWrong, TimeoutError) as error:
        raise CellFailed(_explained(specification, invocation, error)) from None
    if _property(specification.unit, "InvocationID") != invocation or not _active(specification.unit):
        raise CellFailed(_explained(specification, invocation, None))
    return {
        "status": "measured",
        "warmup_rounds": warmup_rounds,
        "warmup_stable": stable,
        "generator": generator,
        "rounds": [measured.model_dump() for measured in rounds],
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


def _calibrated(run: Run, engine: Engine, workload: Workload) -> float:
    """Tokens a filler word is; measured once a sweep and model, so that every configuration gets the same prompts."""
    if not workload.context:
        return 1.0
    path = run.directory / "calibration.json"
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    if engine.specification.model not in known:
        known[engine.specification.model] = load.tokens_a_word(engine, WORDS, run.sweep.request_seconds)
        _write(path, json.dumps(known))
    return known[engine.specification.model]


def _warm_up(run: Run, engine: Engine, workload: Workload, ratio: float) -> tuple[int, bool | None]:
    """Rounds until two in a row are equally fast. Returns how many, and whether they were (None: one was asked for)."""
    warmup, speeds = run.sweep.warmup, list[float]()
    while len(speeds) < warmup.most:
        speeds.append(_unmeasured(run, engine, workload, f"warm-up {len(speeds)}", ratio))
        if len(speeds) >= max(2, warmup.least) and math.isclose(speeds[-2], speeds[-1], rel_tol=warmup.tolerance):
            return len(speeds), True
    return len(speeds), False if len(speeds) > 1 else None


def _unmeasured(run: Run, engine: Engine, workload: Workload, round_name: str, ratio: float) -> float:
    """One prompt a stream, which no result holds; output tokens a second."""
    texts = run.sweep.prompts.get(workload.prompts, [])
    prompts = list(requests_of(workload, texts, round_name, ratio, count=workload.concurrency))
    return load.warm(engine, workload, prompts, run.sweep.request_seconds)


def _profiled(run: Run, engine: Engine, workload: Workload, ratio: float) -> dict[str, float]:
    """AllReduce's share while the workload runs once more; empty, and reported, where it cannot be measured."""
    name = engine.specification.name
    tokens = min(workload.output_tokens, profile.PROFILED_TOKENS)
    short = workload.model_copy(update={"output_tokens": tokens, "ignore_eos": True})
    try:
        profile.start(engine)
        _unmeasured(run, engine, short, "profile", ratio)
        return profile.stop(engine)
    except profile.ProfileFailed as error:
        run.say(f"{name}, {workload.id}: not profiled: {error}")
        return {}


def _round(run: Run, engine: Engine, workload: Workload, prompts: Iterator[str], directory: Path) -> tuple[Round, str]:
    """One measured window, with the engine's counters over exactly this window; the load generator's version."""
    specification = engine.specification
    with undisturbed(specification):
        before = counters.wait_idle(engine, IDLE_SECONDS)
        with counters.Observer(engine) as observer:
            client = load.Generator(run.sweep.generator, run.sweep.request_seconds)
            measured, generator = client.measure(workload, engine, prompts, directory)
        after = counters.wait_idle(engine, IDLE_SECONDS)
    if counters.went_back(before, after, specification.engine):
        raise load.LoadFailed("the engine's counters fell: it was started anew during the round")
    counted = counters.window(before, after, specification, measured.requests)
    return measured.model_copy(update={"counters": counted, "observed": observer.summary()}), generator


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises RigctlError when it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise RigctlError(
            f"{path} cannot be written: {error.strerror}; finished cells are kept: make room and run again"
        ) from None
