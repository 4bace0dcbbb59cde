"""`rigctl train`: what a training would take, its run, how far it is, and its drafter where engines read it."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable

from rigctl.contract import layout
from rigctl.contract.confinement import confined
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.services.systemd import properties, systemctl
from rigctl.training import publish, runs, step
from rigctl.training.progress import Progressed, line

LIMIT_SECONDS = 30 * 24 * 3600


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the command line."""
    parser = subparsers.add_parser("train", help="make a drafter of one's own")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (run, text) in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("name", help="of a training (`trainings` in the host's data)")
        action.add_argument("--json", action="store_true")
        action.set_defaults(run=lambda arguments, run=run: run(runs.read_job(arguments.name), arguments))
        if name == "run":
            action.add_argument("--again", choices=("evaluate",), help="do this stage anew")


def plan(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """Exit code 1 where something does not fit."""
    found = runs.plan(job)
    print(json.dumps(vars(found)) if arguments.json else "\n".join(found.lines(job)))
    return 1 if found.refused else 0


def start(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """Start the job, or say that it runs."""
    return _start(job)


def evaluate(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """Start the job, which then counts every drafter anew."""
    return _start(job, "--again", "evaluate")


def _start(job: TrainingJob, *more: str) -> int:
    unit = layout.training_unit(job.name)
    found = runs.plan(job)
    if found.refused:
        raise RigctlError("; ".join(found.refused))
    while properties(unit, ["ActiveState"])["ActiveState"] == "deactivating":
        time.sleep(0.5)  # one that was killed gives the cards back
    if _active(unit):
        print(f"{unit} is at work; `rigctl train status {job.name}` says how far it is")
        return 0
    subprocess.run(["systemctl", "reset-failed", unit], capture_output=True, check=False)
    command = ["systemd-run", *options(job.name), "--", layout.RIGCTL, "train", "run", job.name, *more]
    done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RigctlError(f"{unit} could not be started: {done.stderr.strip()}")
    print(f"{unit} has begun; `rigctl train status {job.name}` says how far it is")
    return 0


def options(name: str) -> list[str]:
    """Of systemd-run, for the job of a training: root, which writes wherever engines' data may lie."""
    more = [f"RuntimeMaxSec={LIMIT_SECONDS}", f"ExecStopPost={layout.RIGCTL} train after {name}"]
    return confined(layout.training_unit(name), None, "loopback", watches=True, more=more)


def _active(unit: str) -> bool:
    return properties(unit, ["ActiveState"])["ActiveState"] in ("active", "activating", "deactivating")


def run(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """What the job runs."""
    runs.run(job, again=arguments.again)
    print(f"{job.name}: every step is done")
    return 0


def after(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """Used by systemd: what served before a run that was cut serves again."""
    if runs.Before.known(runs.state(job)) is not None:
        runs.give_back(job, wait=False)
    return 0


def status(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """How far each step is."""
    records, unit = Place(job.directory), layout.training_unit(job.name)
    at_work = _active(unit)
    answered = step.known(records, step.Step("answers"))
    parts = runs.parts_of(job) if answered and answered.done else 1
    found = {str(one): step.known(records, one) for one in runs.steps(job, parts)}
    last = Progressed.known(records)
    content = {
        "name": job.name,
        "state": "running" if at_work else "done" if all(one and one.done for one in found.values()) else "stopped",
        "steps": {name: one.model_dump() if one else None for name, one in found.items()},
        "progress": last.model_dump() if last else None,
        "published": publish.published(job),
    }
    if arguments.json:
        print(json.dumps(content))
        return 0
    print(f"{job.name}: {content['state']}")
    for name, one in found.items():
        took = f"{one.rows:,} rows, {one.tokens:,} tokens, {one.seconds:,.0f} s" if one and one.done else ""
        print(f"  {name:<20} {'done' if one and one.done else 'begun' if one else 'to do':<6} {took}".rstrip())
    if at_work and last:
        print(f"  now: {line(last)}")
    return 0


def stop(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """End the job; what it has made stays, and the next start goes on."""
    unit = layout.training_unit(job.name)
    if not _active(unit):
        print(f"{unit} does not run")
        return 0
    systemctl("stop", unit)
    print(f"{unit} has ended; `rigctl train start {job.name}` goes on")
    return 0


def publish_it(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """Put the drafter where engines read it, with its receipt."""
    receipt = publish.publish(job)
    print(json.dumps(receipt) if arguments.json else f"{job.publish} is published at {job.publish_path}")
    return 0


def receipt(job: TrainingJob, arguments: argparse.Namespace) -> int:
    """What was published, and all that it was made from: one line of JSON."""
    print(json.dumps(json.loads(runs.state(job).read(publish.RECEIPT, publish.RECORD_BYTES))))
    return 0


Action = Callable[[TrainingJob, argparse.Namespace], int]
ACTIONS: dict[str, tuple[Action, str]] = {
    "plan": (plan, "what it takes: tokens, bytes, hours (exit code 1: something does not fit)"),
    "start": (start, "start it, or go on where it ended"),
    "status": (status, "how far it is"),
    "stop": (stop, "end it; what it has made stays"),
    "evaluate": (evaluate, "count its drafters anew"),
    "publish": (publish_it, "put its drafter where engines read it; refused where it is no better than its start"),
    "receipt": (receipt, "of what was published: all that it was made from, as JSON"),
    "run": (run, "every step that is not done (what the job runs)"),
    "after": (after, "let serve again what served before (used by systemd)"),
}
