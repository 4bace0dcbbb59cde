"""`rigctl status` and `rigctl chat`: what runs on this host, and a word with it."""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rigctl.checkpoints.precheck import identities
from rigctl.contract import layout
from rigctl.contract.canary import CanaryOutcome, outcome_place
from rigctl.contract.happened import Ended, Fallback, Started, Unreadable, Watched
from rigctl.contract.order import ContractError
from rigctl.contract.run_specification import Endpoint
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.services.systemd import UNITS, properties
from rigctl.supervisor.ended import failures
from rigctl.supervisor.engine_client import BAD_ANSWERS, engine_of
from rigctl.supervisor.live_settings import WARNING
from rigctl.supervisor.readiness import reason, reasoning_of
from rigctl.supervisor.specification import Specification, configurations, installed, named, runtime_of

WANTED = ["ActiveState", "StatusText", "Result", "ExecMainStatus", "NRestarts", "NeedDaemonReload", "DropInPaths"]
SHOWN_ROUTES = 6
# Exit codes of systemd itself when it cannot set a unit up (systemd.exec(5)).
SETUP_FAILURES = {
    "203": "rigctl cannot be run: deploy again",
    "217": "its user does not exist: deploy again",
    "226": "its sandbox cannot be set up; `rigctl logs` says why",
    "243": f"a credential is missing or unreadable: check {layout.CREDENTIALS}, set api_key_file and deploy again",
}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = subparsers.add_parser("status", help="what runs, how its load proceeds, what its drafter achieves")
    status.add_argument("--json", action="store_true", help="the same as one JSON list")
    status.set_defaults(run=show)
    chat = subparsers.add_parser("chat", help="one chat completion, and what speculation did for it")
    chat.add_argument("prompt")
    chat.add_argument("--configuration", help="default: the one that is active")
    chat.add_argument("--max-tokens", type=int, default=256)
    chat.add_argument("--json", action="store_true")
    chat.set_defaults(run=talk)


def show(arguments: argparse.Namespace) -> int:
    """Print one line a configuration, and below it whatever an operator should know."""
    fallback = last_fallback()
    failed = fallback.failed if fallback else None
    shown = [{**found, "fallback": _json(fallback) if found["name"] == failed else None} for found in rows()]
    if arguments.json:
        print(json.dumps(shown, indent=2))
        return 0
    several = sum(found["state"] == "active" for found in shown) > 1
    for found in shown:
        print(f"{found['state']:<12} {found['name']:<32} {found['status']}".rstrip())
        if several and found["state"] == "active":
            cards = f", GPUs {' '.join(map(str, found['gpus']))}" if found["gpus"] else ""
            print(f"{'':<12} {'':<32} {found['model']} at {found['address']}{cards}")
        for remark in found["remarks"]:
            print(f"{'':<12} {'':<32} {remark}")
    if fallback:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fallback.at))
        print(f"fallback: at {when} {fallback.failed} was not accepted ({fallback.cause}); {fallback.outcome}")
    return 0


def serving() -> Place:
    """Where the last fallback is recorded, beside the directories of the configurations."""
    return Place(layout.SERVING)


def last_fallback() -> Fallback | None:
    """The last fallback of this host."""
    return Fallback.known(serving())


def _json(record: BaseModel | None) -> dict[str, Any] | None:
    return record.model_dump(mode="json", exclude_unset=True) if record else None


def rows() -> list[dict[str, Any]]:
    """Every configuration by name; one whose specification cannot be used has the reason as its status."""
    return [
        row(found) if isinstance(found, Specification) else _unusable(name, found)
        for name, found in configurations().items()
    ]


def _unusable(name: str, why: ContractError) -> dict[str, Any]:
    state = properties(layout.unit_name(name), WANTED)["ActiveState"]
    ran_as, _ = _started(runtime_of(name), state)
    known: dict[str, Any] = {
        "name": name,
        "state": state,
        "status": str(why),
        "started": _json(ran_as),
        "stale": False,
        "remarks": [],
    }
    return {**known, "release": None, "running_release": None, "digest": None}


def _started(runtime: Place, state: str) -> tuple[Started | None, str | None]:
    """What a service that runs was started with, and why that is not known."""
    if state not in ("active", "deactivating"):
        return None, None
    try:
        found = Started.read(runtime)
    except Unreadable as error:
        return None, str(error)
    missing = f"{runtime}/{Started.FILE} is missing"
    return found, missing if found is None and state == "active" else None


def row(specification: Specification) -> dict[str, Any]:
    """Everything that is known of one configuration; never asks the engine, so it answers at once."""
    unit = properties(specification.unit, WANTED)
    state = unit["ActiveState"]
    ran_as, unknown = _started(specification.runtime, state)
    stale = f"what it was started with is not known ({unknown})" if unknown else _stale(specification, ran_as)
    watch = (Watched.known(specification.runtime) if ran_as else None) or Watched()
    ended = Ended.known(specification.state) if state != "active" else None
    canary = _canary(specification, ran_as)
    return {
        "name": specification.name,
        "state": state,
        "status": _status_text(unit, ended),
        "release": specification.release,
        "running_release": ran_as.release if ran_as else None,
        "digest": specification.digest,
        "address": specification.endpoint.address,
        "model": specification.model,
        "gpus": specification.gpus,
        "api_key": specification.api_key,
        "accepted_at": ran_as.accepted_at if ran_as else None,
        "started": _json(ran_as),
        "watch": _json(watch) or None,
        "acceptance_length": watch.acceptance_length,
        "restarts": int(unit["NRestarts"] or 0),
        "failures": failures(specification),
        "last_end": _json(ended),
        "stale": stale is not None,
        "edited": _edited(specification, unit),
        "canary": canary,
        "remarks": [
            *_of_unit(specification, unit, stale, ran_as),
            *([f"CANARY WORSE: {why}" for why in canary["reasons"][:3]] if canary["present"] else ()),
            *(_of_run(ran_as, watch) if ran_as else ()),
            *(_of_end(ended, failed=state == "failed") if ended else ()),
        ],
    }


def _status_text(unit: dict[str, str], ended: Ended | None) -> str:
    if unit["ActiveState"] == "failed":
        if why := SETUP_FAILURES.get(unit["ExecMainStatus"]):
            return why
        return (ended and ended.cause) or unit["StatusText"] or unit["Result"]
    return unit["StatusText"] if unit["ActiveState"] != "inactive" else ""


def _stale(specification: Specification, ran_as: Started | None) -> str | None:
    """What has changed since the service that runs was started; None when nothing has, or nothing runs."""
    if ran_as is None:
        return None
    if not {ran_as.digest, *ran_as.same_as}.intersection(specification.known_as):
        return "deployed anew since it was started"
    try:
        now = identities(specification)
    except RigctlError:
        return None  # on its way: staging and verification say so themselves
    changed = [name for name, was in ran_as.checkpoints.items() if now.get(name) != was]
    return f"{', '.join(changed)} replaced since it was started" if changed else None


def _canary(specification: Specification, ran_as: Started | None) -> dict[str, Any]:
    """How its last canary ended. present: that was of what runs now, or would be started."""
    found = CanaryOutcome.known(outcome_place(specification.name))
    present = [ran_as.digest, *ran_as.same_as] if ran_as else specification.known_as
    return {
        "verdict": found and found.verdict,
        "present": found is not None and found.run.settings.digest in present,
        "reasons": found.reasons if found else [],
        "at": found and found.run.at,
    }


def _edited(specification: Specification, unit: dict[str, str]) -> list[str]:
    """Files that change the unit and are not as deployed."""
    path = UNITS / specification.unit
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return [f"{path} is missing"]
    edited = [] if digest == specification.unit_digest else [str(path)]
    return edited + unit["DropInPaths"].split()


def _of_unit(
    specification: Specification, unit: dict[str, str], stale: str | None, ran_as: Started | None
) -> Iterator[str]:
    """Remarks on a unit beside what is deployed."""
    if stale:
        runs = (ran_as and ran_as.release) or specification.release
        releases = f" (runs {runs}, deployed is {specification.release})" if runs != specification.release else ""
        yield f"STALE: {stale}{releases}; `systemctl restart` takes it over"
    if edited := _edited(specification, unit):
        yield f"EDITED BY HAND: {', '.join(edited)}; deploy again, or move the change to inventory/serving.yaml"
    if unit["NeedDaemonReload"] == "yes":
        yield "systemd has not read its unit again; deploy again or `systemctl daemon-reload`"
    if unit["ActiveState"] in ("active", "activating") and (causes := failures(specification)):
        yield f"restarted after: {causes[-1]}"


def _of_run(ran_as: Started, watch: Watched) -> Iterator[str]:
    """Remarks on the run of a service."""
    drafter = ran_as.prechecks.get("drafter fits", "no drafter")
    if drafter != "no drafter":
        yield f"drafter {drafter}"
    if watch.below_floor:
        yield (
            f"acceptance length {watch.acceptance_length} is below {watch.acceptance_floor}: "
            "slower than without a drafter"
        )
    if watch.own_rate is not None:
        yield f"the engine's own rate {watch.own_rate:.2f} is {watch.own_rate_is}"
    for name, outcome in ran_as.prechecks.items():
        if outcome.startswith(WARNING):
            yield f"{name}: {outcome.removeprefix(WARNING)}"
    if opened := ran_as.proved.routes.open_without_key:
        more = f" and {len(opened) - SHOWN_ROUTES} more (`rigctl status --json`)" if len(opened) > SHOWN_ROUTES else ""
        yield f"open without the API key: {', '.join(opened[:SHOWN_ROUTES])}{more}"


def _of_end(ended: Ended, *, failed: bool) -> Iterator[str]:
    """Remarks on the last end of a service."""
    if failed:
        yield from (f"| {line}" for line in ended.last_words)
    yield from ended.left


def talk(arguments: argparse.Namespace) -> int:
    """Send one chat completion and print the answer. Raises RigctlError when nothing is active or it fails."""
    specification = as_running(named(arguments.configuration) if arguments.configuration else active())
    engine = engine_of(specification)
    sampling: dict[str, Any] = {"temperature": None} | {str(key): one for key, one in specification.sampling.items()}
    try:
        before = engine.metrics().speculation if specification.speculation else None
        begun = time.monotonic()
        message = engine.chat(
            [{"role": "user", "content": arguments.prompt}],
            max_tokens=arguments.max_tokens,
            **sampling,
        )["message"]
        seconds = time.monotonic() - begun
        after = engine.metrics().speculation if specification.speculation else None
    except BAD_ANSWERS as error:
        raise RigctlError(f"{specification.name} does not answer: {reason(error)}; see `rigctl status`") from None
    counted = after.since(before) if after and before else None
    answer = {
        "configuration": specification.name,
        "content": message.get("content") or "",
        "reasoning": reasoning_of(message),
        "seconds": round(seconds, 3),
        "drafted": counted.drafted if counted else None,
        "accepted": counted.accepted if counted else None,
        "acceptance_length": counted.acceptance_length if counted else None,
    }
    print(json.dumps(answer) if arguments.json else _text(answer))
    return 0


def _text(answer: dict[str, Any]) -> str:
    lines = [answer["content"].strip(), "", f"{answer['configuration']}, {answer['seconds']:.2f} s"]
    if answer["drafted"]:
        share = 100 * answer["accepted"] / answer["drafted"]
        lines[-1] += (
            f"; {answer['accepted']} of {answer['drafted']} drafted tokens accepted ({share:.0f} %), "
            f"acceptance length {answer['acceptance_length']:.2f}"
        )
    return "\n".join(lines)


def as_running(specification: Specification) -> Specification:
    """The specification with the address at which its running engine listens: a deploy may have moved it."""
    pid = properties(specification.unit, ["MainPID"])["MainPID"]
    try:
        words = Path("/proc", pid or "0", "cmdline").read_bytes().decode(errors="replace").split("\0")
        host, port = (words[words.index(flag) + 1] for flag in ("--host", "--port"))
        there = Endpoint.validated({"host": host, "port": int(port)}, f"command line of process {pid}")
    except (OSError, ValueError, IndexError, ContractError):
        return specification
    return specification.model_copy(update={"endpoints": [there]})


def active() -> Specification:
    """The configuration that serves. Raises RigctlError when none does, or several."""
    found = [one for one in installed() if properties(one.unit, ["ActiveState"])["ActiveState"] == "active"]
    if not found:
        raise RigctlError("no configuration is active; start one with `systemctl start kimi-<configuration>`")
    if len(found) > 1:
        listed = ", ".join(f"{one.name} ({one.endpoint.address}, {one.model})" for one in found)
        raise RigctlError(f"several configurations are active: {listed}; name the one you mean")
    return found[0]
