"""`rigctl ended`: runs after every end of a serving unit (ExecStopPost=). Clears up, and writes down what happened."""

import argparse
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rigctl.contract.happened import Cause, Ended, Failures, Started, record_text
from rigctl.guarded import Place
from rigctl.supervisor.activity import gpu_memory, members
from rigctl.supervisor.specification import Specification

OF_ONE_RUN = ("started.json", "watch.json", "metrics", "metrics.prom", "engine.yaml")
KILLED = "by hand, or by the kernel for lack of memory (`journalctl -k` tells)"
RESTARTED_SECONDS = 10  # systemd starts the unit again after RestartSec=1
GRACE_SECONDS = 0.5  # helpers of a multiprocessing program end by themselves a moment after it


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("ended", help="clear up after a serving unit (used by systemd)")
    parser.add_argument("specification", type=Path)
    parser.set_defaults(run=lambda arguments: record(Specification.read(arguments.specification)))


def record(specification: Specification) -> int:
    """End what is left of the unit, look for what it still holds, and write ended.json and the series of failures."""
    killed = end_group(polite_seconds=2)
    left = _gpu_left_overs(specification)
    result = os.environ.get("SERVICE_RESULT", "success")  # systemd.exec(5)
    cause = None if result == "success" else _cause(specification, result)
    started = Started.known(specification.runtime)
    series = [] if cause is None else [*_unhealthy(specification, started), cause]
    note(specification.runtime, Failures.FILE, {"failures": series, "monotonic": time.monotonic()})
    ended: dict[str, Any] = {
        "at": time.time(),
        "since_boot": [boot_id(), time.monotonic()],
        "result": result,
        "cause": cause,
        "accepted": started is not None,
        "failures": len(series),
        "killed": killed,
        "left": left,
    }
    # An engine that once worked on this boot may start again without what a later policy wants at the next one.
    before = Ended.known(specification.state)
    ended["accepted_boot"] = boot_id() if started is not None else before and before.accepted_boot
    words = Cause.known(specification.runtime)
    note(specification.state, Ended.FILE, {**ended, "last_words": words.last_words if words else []})
    clear(specification)
    for line in [*(f"ended {process}" for process in killed), *left]:
        print(f"left over: {line}", flush=True)
    return 0


def clear(specification: Specification) -> None:
    """Remove what is true of one run only, its metrics too."""
    specification.runtime.remove(*OF_ONE_RUN)


def note(place: Place, name: str, content: dict[str, Any]) -> None:
    """Write a file of what happened, whole or not at all. A full disk is reported and ends nothing.

    It may hold lines of the engine's log: as private as that.
    """
    try:
        place.write(name, record_text(content), 0o640)
    except OSError as error:
        print(f"not written down: {error.filename or place}: {error.strerror}", flush=True)


def boot_id() -> str:
    """Which boot this is: times on the monotonic clock of two boots cannot be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def failures(specification: Specification) -> list[str]:
    """Causes of the failures in a row that came before this run; empty after a stop or a long healthy run."""
    found = Failures.known(specification.runtime)
    return found.failures if found else []


def taken_up(specification: Specification) -> list[str]:
    """The failures that a restart by systemd goes on from.

    A stop during systemd's wait before a restart leaves them behind: what starts later is not that restart.
    """
    found = Failures.known(specification.runtime)
    if found is None or found.monotonic is None or time.monotonic() - found.monotonic > RESTARTED_SECONDS:
        specification.runtime.remove(Failures.FILE)
    return failures(specification)


def _unhealthy(specification: Specification, started: Started | None) -> list[str]:
    """The series so far, forgotten when the run that has ended was healthy for long enough."""
    if started is not None:
        served = time.monotonic() - started.accepted_monotonic
        if served > specification.limits.healthy_minutes * 60:
            return []
    return failures(specification)


def _cause(specification: Specification, result: str) -> str:
    if written := Cause.known(specification.runtime):
        return written.cause
    code, status = os.environ.get("EXIT_CODE", "?"), os.environ.get("EXIT_STATUS", "?")
    known = {
        "oom-kill": "the kernel ended it for lack of memory",
        "timeout": "the supervisor did not answer systemd in time",
        "watchdog": "the supervisor hung",
    }
    killed = f": {KILLED}" if status == "KILL" else ""
    return known.get(result) or f"the supervisor ended by itself ({code}, {status}{killed})"


def end_group(*, polite_seconds: float) -> list[str]:
    """End every other process of this control group; the command lines of those that had to be ended."""
    grace = time.monotonic() + GRACE_SECONDS
    while members() and time.monotonic() < grace:
        time.sleep(0.02)
    found = {pid: command(pid) for pid in members()}
    if not found:
        return []
    end = time.monotonic() + polite_seconds
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while members() and time.monotonic() < end:
            time.sleep(0.05)
        end = time.monotonic() + 10
    return [f"{pid} {line}" for pid, line in found.items()]


def command(pid: int) -> str:
    """Command line of a process, shortened; its name where it has none."""
    try:
        process = psutil.Process(pid)
        words = [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
        text = " ".join(words).strip()[:160] or f"[{process.name()}]"
        return text.encode(errors="surrogateescape").decode(errors="replace")
    except psutil.Error:
        return "(gone)"


def _gpu_left_overs(specification: Specification) -> list[str]:
    limits = specification.limits
    end = time.monotonic() + limits.gpu_wait_seconds
    while True:
        busy = {index: used for index, used in gpu_memory(specification.gpus).items() if used > limits.gpu_free_mib}
        if not busy or time.monotonic() > end:
            return [f"GPU {index} still holds {used} MiB; `rigctl free` names who" for index, used in busy.items()]
        time.sleep(0.5)
