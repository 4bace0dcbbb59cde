"""`rigctl switch`, `logs`, `fallback`: from one configuration to another, and back when that fails."""

import argparse
import subprocess
import time
from contextlib import suppress
from typing import Any

from rigctl.contract.happened import Accepted, Ended, Fallback, record_text
from rigctl.errors import RigctlError
from rigctl.services.status import active, as_running, last_fallback, row, serving
from rigctl.services.systemd import properties, systemctl
from rigctl.services.warming import warm
from rigctl.supervisor.ended import boot_id
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine, engine_of
from rigctl.supervisor.specification import Specification, installed, named

# A start that follows a stop within this time has displaced what was stopped.
DISPLACED_SECONDS = 15
IDLE_POLL_SECONDS = 2


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    switch = subparsers.add_parser("switch", help="start a configuration, stop those in its way, show the load")
    switch.add_argument("name")
    switch.add_argument("--warm", action="store_true", help="first read its files into memory, while the other serves")
    switch.set_defaults(run=lambda arguments: switch_to(named(arguments.name), warmed=arguments.warm))
    restart = subparsers.add_parser("restart", help="restart a configuration that runs, so that it takes a deploy over")
    restart.add_argument("name")
    restart.add_argument("--when-idle", action="store_true", help="wait until no request runs")
    restart.set_defaults(run=lambda arguments: restart_unit(named(arguments.name), when_idle=arguments.when_idle))
    logs = subparsers.add_parser("logs", help="the journal of a configuration, or the log file of one of its runs")
    logs.add_argument("name", nargs="?", help="default: the one that is active")
    logs.add_argument("-f", "--follow", action="store_true")
    # Not `run`: that is the subcommand's own function.
    logs.add_argument("--run", dest="number", type=int, metavar="N", help="the N-th last run's file; 1 is the last")
    logs.set_defaults(run=show_logs)
    fallback = subparsers.add_parser("fallback", help="go back to the last accepted configuration (used by systemd)")
    fallback.add_argument("name")
    fallback.set_defaults(run=lambda arguments: fall_back(named(arguments.name)))


def switch_to(specification: Specification, *, warmed: bool = False) -> int:
    """Start it and follow its load. Raises RigctlError with the cause when it is not accepted."""
    if warmed:
        try:
            warm(specification)
        except RigctlError as error:
            print(f"switching without it: {error}", flush=True)
    serving().remove(Fallback.FILE)
    begun = time.time()
    starting = subprocess.Popen(["systemctl", "start", specification.unit], stderr=subprocess.PIPE, errors="replace")
    shown, found = "", {"StatusText": "", "ActiveState": ""}
    # systemctl is cut off where systemd itself is replaced (daemon-reexec, its upgrade): the start goes on.
    while starting.poll() is None or found["ActiveState"] == "activating":
        with suppress(RigctlError):
            found = properties(specification.unit, ["StatusText", "ActiveState"])
        text = found["StatusText"]
        if text and text.split("(")[0] != shown.split("(", maxsplit=1)[0]:
            print(text, flush=True)
            shown = text
        time.sleep(0.5)
    if starting.returncode == 0 or found["ActiveState"] == "active":
        print(f"{specification.name} serves on {specification.base_url}: {row(specification)['status']}")
        return 0
    ended = Ended.known(specification.state) or Ended()
    told = starting.stderr.read().strip() if starting.stderr else ""
    cause = ended.cause if ended.at >= begun and ended.cause else f"{row(specification)['status']} ({told})"
    went_back = _await_fallback(specification.name, begun)
    raise RigctlError(f"{specification.name} does not serve: {cause}{went_back}")


def _await_fallback(name: str, since: float) -> str:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        record = last_fallback()
        if record and record.failed == name and record.at >= since:
            return f"; {record.outcome}"
        time.sleep(0.2)
    return ""


def restart_unit(specification: Specification, *, when_idle: bool) -> int:
    """Restart it if it runs and has not taken the deploy over meanwhile; 0 also when it was stopped meanwhile."""
    engine, waited = engine_of(as_running(specification)), False
    while (state := properties(specification.unit, ["ActiveState"])["ActiveState"]) not in ("inactive", "failed"):
        if state != "active":
            if not waited:
                print(f"{specification.name} is {state}: waiting until it serves", flush=True)
            waited = True
        elif waited and not row(specification)["stale"]:
            print(f"{specification.name} was started meanwhile and runs as deployed: nothing to restart")
            return 0
        elif not when_idle or _idle(engine):
            systemctl("restart", specification.unit)
            return 0
        time.sleep(IDLE_POLL_SECONDS)
    name = specification.name
    print(f"{name} does not run ({state}): nothing to restart; `rigctl switch {name}` starts it")
    return 0


def _idle(engine: Engine) -> bool:
    with suppress(*BAD_ANSWERS):
        now = engine.metrics()
        return now.running + now.waiting == 0
    return False


def show_logs(arguments: argparse.Namespace) -> int:
    """Show the journal or one run's file. Raises RigctlError when there is none."""
    specification = named(arguments.name) if arguments.name else active()
    if arguments.number is None:
        follow = ["-f"] if arguments.follow else ["--no-pager"]
        return _shown(["journalctl", "-u", specification.unit, "-n", "200", *follow])
    runs = specification.logs.names(".log")[::-1]
    if not 1 <= arguments.number <= len(runs):
        raise RigctlError(f"{specification.logs} has {len(runs)} runs; --run takes 1 (the last) to {len(runs)}")
    follow = ["-f"] if arguments.follow else []
    with specification.logs.open(runs[arguments.number - 1]) as file:
        return _shown(["tail", "-n", "+1", *follow], stdin=file)


def _shown(command: list[str], **how: Any) -> int:
    """Print what a command says, through the gate for foreign words; its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, errors="replace", **how) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
    return process.returncode


def fall_back(failed: Specification) -> int:
    """Start all that `failed` displaced, once: never what a start displaced that was itself a fallback."""
    end = Ended.known(failed.state) or Ended()
    last = last_fallback()
    went_back, began = (last.to, last.began) if last else ([], 0.0)
    back: list[Specification] = []
    if failed.name in went_back and _accepted(failed) < began and not end.accepted:
        text = f"{failed.name}, to which it had gone back, is not accepted either: it stays down"
    elif end.accepted or not (back := _displaced(failed)):  # what crashed in service is for the operator
        print(f"{failed.name}: nothing to go back to")
        return 0
    else:
        began, went_back = time.time(), [one.name for one in back]
        text = f"{' and '.join(one.name for one in back)} {'is' if len(back) == 1 else 'are'} started again"
    cause = end.cause or row(failed)["status"]
    record = {"at": time.time(), "failed": failed.name, "cause": cause, "outcome": text}
    serving().write(Fallback.FILE, record_text({**record, "to": went_back, "began": began}), 0o640)
    print(f"{failed.name}: {text}", flush=True)
    if back:
        systemctl("start", "--no-block", *(one.unit for one in back))
    return 0


def _displaced(failed: Specification) -> list[Specification]:
    """What was stopped just before `failed` was started; of two that exclude each other the one accepted last.

    On the monotonic clock: between the two the other one may be set.
    """
    unit = properties(failed.unit, ["InactiveExitTimestampMonotonic"])
    began = int(unit["InactiveExitTimestampMonotonic"] or 0) / 1e6
    candidates: list[tuple[float, Specification]] = []
    for other in installed():
        boot, stopped = (Ended.known(other.state) or Ended()).since_boot
        accepted = _accepted(other)
        displaced = boot == boot_id() and began - DISPLACED_SECONDS < stopped <= began + 1
        if other.name != failed.name and accepted and displaced:
            candidates.append((accepted, other))
    back: list[Specification] = []
    for _, other in sorted(candidates, key=lambda found: found[0], reverse=True):
        if not any(_exclude(other, one) for one in back):
            back.append(other)
    return back


def _accepted(specification: Specification) -> float:
    """When it was accepted last (Unix seconds), 0 for never."""
    found = Accepted.known(specification.state)
    return found.at if found else 0.0


def _exclude(one: Specification, other: Specification) -> bool:
    """Whether two configurations claim the same GPU or port (rig/artifacts/units.py writes their Conflicts=)."""
    ports = ({endpoint.port for endpoint in each.endpoints} for each in (one, other))
    return bool(set(one.gpus) & set(other.gpus) or set.intersection(*ports))
