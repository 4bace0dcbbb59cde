"""`rigctl checkpoints`: stage, verify, repair, adopt, fit and show checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rigctl.checkpoints import fit, overlay, progress, record, structure, verify, workplace
from rigctl.checkpoints.precheck import judge
from rigctl.checkpoints.sink import disk_error
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.eagle3_conventions import Engine
from rigctl.contract.served_checkpoints import DrafterPairs, Training
from rigctl.contract.speculation import WITH_DRAFTER
from rigctl.engine_registry import architectures
from rigctl.errors import RigctlError
from rigctl.lock_files import Busy
from rigctl.whole_files import read_json

if TYPE_CHECKING:
    from rigctl.checkpoints.staging import Job, Outcome

FOLLOW_EVERY = 1.0  # seconds between two looks at a running job
FOLLOW_GRACE = 5.0  # seconds a job may take to begin, or to write its last status


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("checkpoints", help="model and drafters: stage, prove, repair, fit")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (run, text, options) in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        for option, keys in {"--json": {**SWITCH, "help": "JSON lines instead of text"}, **options}.items():
            action.add_argument(option, **keys)
        action.set_defaults(run=partial(_told, run))


def _told(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command; a full disk or missing rights end in a message with the path."""
    try:
        return run(arguments)
    except OSError as error:
        raise RigctlError(f"{error.filename or arguments.action}: {error.strerror or error}") from error


# -- jobs ----------------------------------------------------------------------------------------------------


def _order(arguments: argparse.Namespace) -> CheckpointJob:
    order = CheckpointJob.read(arguments.spec)
    if arguments.name != order.name:
        raise RigctlError(f"{arguments.spec} describes {order.name}, not {arguments.name}")
    return order


def _new_job(order: CheckpointJob) -> Job:
    # Not above: the clients of hub and web take a while to import, and few commands fetch anything.
    from rigctl.checkpoints import staging

    return staging.Job(order, record.from_environment(), progress.Progress(order.name), threading.Event())


def _stage(arguments: argparse.Namespace) -> int:
    if not arguments.plan:
        return _job(arguments, lambda job: job.stage())
    job = _new_job(_order(arguments))
    manifest = job.manifest()
    if manifest is None:
        raise RigctlError(f"{arguments.name}: the size of what is generated is known only when it is made")
    plan = job.plan(manifest)
    _print(arguments, {**vars(plan), "bytes_needed": plan.bytes_needed}, plan.line())
    job.refuse_without_space(plan)
    return 0


def _job(arguments: argparse.Namespace, work: Callable[[Job], Outcome]) -> int:
    """Run one job with its status file; SIGTERM and SIGINT end it cleanly, what is fetched stays."""
    job = _new_job(_order(arguments))
    name, said = job.order.name, job.progress
    if workplace.is_locked(job.state, name):
        raise Busy(f"{name}: a job is running already; follow it with `rigctl checkpoints follow {name}`")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: job.stop.set())
    with progress.Reporter(said, job.state.job_path(name), as_json=arguments.json, every=arguments.every):
        try:
            outcome = work(job)
        except (RigctlError, OSError) as error:
            told = disk_error(error, str(job.workplace.root)) if isinstance(error, OSError) else error
            said.state, said.message = "stopped" if isinstance(error, verify.Cancelled) else "failed", str(told)
            raise told from error
        said.state, said.phase, said.message = "done", "done", outcome.state
    content = {"outcome": outcome.state, "changed": outcome.changed, **_summary(outcome.record)}
    _print(arguments, content, f"{name}: {outcome.state} in {outcome.record.path}")
    return 0


def _follow(arguments: argparse.Namespace) -> int:
    state = record.from_environment()
    place = state.job_path(arguments.name)
    shown, started = 0.0, time.monotonic()
    while not place.exists() and time.monotonic() - started < FOLLOW_GRACE:
        time.sleep(FOLLOW_EVERY)
    while True:
        running = workplace.is_locked(state, arguments.name)
        status = read_json(place, "status of the job")
        # a job that begins writes its status before it has its lock
        running |= status["state"] == "running" and time.time() - status["updated"] < FOLLOW_GRACE
        if not running or time.monotonic() - shown >= arguments.every:
            shown = time.monotonic()
            _print(arguments, status, progress.line(status))
        if not running:
            break
        time.sleep(FOLLOW_EVERY)
    if status["state"] == "running":
        raise RigctlError(f"{arguments.name}: the job was killed; run it again, it resumes")
    if status["state"] != "done":
        raise RigctlError(f"{arguments.name}: {status['state']}: {status['message']}")
    return 0


# -- records -------------------------------------------------------------------------------------------------


def _summary(known: record.Record) -> dict[str, Any]:
    kept = ("name", "path", "kind", "origin", "verified_at", "verified_seconds", "foreign", "digests_from")
    manifest = known.manifest
    return {
        **{key: getattr(known, key) for key in kept},
        "source": manifest.source,
        "revision": manifest.revision,
        "identity": manifest.identity(),
        "bytes": manifest.total,
        "files": len(manifest.files),
    }


def _status(arguments: argparse.Namespace) -> int:
    state = record.from_environment()
    names = arguments.names or state.names()
    for name in names:
        content = _state_of(state, name)
        _print(arguments, content, _status_line(content))
    if not names and not arguments.json:
        print(f"no checkpoint is recorded in {state.root}")
    return 0


def _state_of(state: record.State, name: str) -> dict[str, Any]:
    """What is known of one checkpoint: running or interrupted job, record, quick verification."""
    known = state.load(name)
    job = read_json(state.job_path(name), "status of the job") if state.job_path(name).exists() else None
    content: dict[str, Any] = {"name": name, "state": "unknown"}
    if known is not None:
        report = record.quick_report(known)
        content.update(_summary(known), quick=report.to_json(), fault=record.fault(known, report))
        content["state"] = "complete" if report.complete else "damaged"
    if job is not None and workplace.is_locked(state, name):
        content.update(state="running", job=job)
    elif job is not None and job["state"] != "done":
        word = "interrupted" if job["state"] == "running" else job["state"]
        content.update(job={**job, "state": word})
        if known is None:
            content["state"] = word
    return content


def _status_line(content: dict[str, Any]) -> str:
    begin = f"{content['name']}: {content['state']}"
    if content["state"] == "running":
        return f"{begin}: {progress.line(content['job'])}"
    if "path" not in content:
        message = content.get("job", {}).get("message")
        return f"{begin}: {message}" if message else begin
    verified = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content["verified_at"]))
    size = progress.human_bytes(content["bytes"])
    revision = content["revision"] or content["identity"][:12]
    return (
        f"{begin}, {content['origin']}, {size} in {content['files']} files, "
        f"revision {revision}, verified {verified}, {content['path']}"
    )


def _verify(arguments: argparse.Namespace) -> int:
    state = record.from_environment()
    names = arguments.names or [name for name in state.names() if state.load(name) is not None]
    if not names:
        raise RigctlError(f"no checkpoint is recorded in {state.root}: there is nothing to verify")
    wrong, spoiled = [], False
    for name in names:
        known = state.require(name)
        report = _proved_anew(state, known) if arguments.full else record.quick_report(known)
        word = "complete" if report.complete else "NOT complete"
        how = "by digest" if arguments.full else "by size, mtime and inode"
        text = f"{name}: {word} {how}, {report.checked} files in {report.seconds:.2f} s"
        content = {"name": name, "full": arguments.full, **report.to_json()}
        _print(arguments, content, "\n  ".join([text, *report.lines()[:50]]))
        if not report.complete:
            wrong.append(name)
            spoiled |= bool(report.damaged or report.missing)
    if wrong:
        cure = "repair it" if arguments.full else "verify with --full, then repair what is damaged"
        cure = cure if spoiled else f"{verify.EXTRA_CURE}: the proved files are right"
        raise RigctlError(f"{', '.join(wrong)}: not as proved; {cure}")
    return 0


def _proved_anew(state: record.State, known: record.Record) -> verify.Report:
    """Verify by digest, and record what that found."""
    root = Path(known.path)
    report = verify.full(root, known.manifest)
    report.foreign = verify.foreign_files(root, known.manifest) if root.is_dir() else []
    known.seen, known.damaged, known.foreign = report.seen, report.damaged, report.foreign
    known.verified_at, known.verified_seconds = time.time(), report.seconds
    state.save(known)
    return report


def _forget(arguments: argparse.Namespace) -> int:
    state, name = record.from_environment(), arguments.name
    known = state.require(name)
    with workplace.locked(state, name, Path(known.path)):
        state.record_path(name).unlink()
        state.job_path(name).unlink(missing_ok=True)
    _print(arguments, {"name": name, "forgotten": True}, f"{name}: forgotten, {known.path} stays")
    return 0


# -- checks --------------------------------------------------------------------------------------------------


def _structure(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    result = structure.check(arguments.directory, arguments.kind)
    seconds = time.monotonic() - started
    text = f"{arguments.directory}: {result.tensors} tensors in {result.shards} shards, {seconds:.2f} s"
    lines = [text, *(f"warning: {item}" for item in result.warnings)]
    _print(arguments, {"seconds": round(seconds, 3), **vars(result)}, "\n  ".join(lines))
    if result.errors:
        raise RigctlError(f"{arguments.directory} cannot be loaded:\n  " + "\n  ".join(result.errors))
    return 0


def _verdict(arguments: argparse.Namespace, drafter: Path) -> fit.Verdict:
    content = read_json(arguments.training, "training") if arguments.training else {}
    training = Training.validated(content, f"training {arguments.training}")
    return fit.check(
        arguments.target,
        drafter,
        Engine(arguments.engine, arguments.version),
        arguments.context,
        training,
        method=arguments.method,
        known=architectures(arguments.env, arguments.engine) if arguments.env else None,
        name=arguments.target_name,
    )


def _overlay(arguments: argparse.Namespace) -> int:
    """Write the overlay and check the pair as the engine will then see it."""
    keys = _verdict(arguments, arguments.drafter).keys
    if not keys:
        raise RigctlError(f"{arguments.drafter}: the layer ids it was trained with are not recorded: nothing to write")
    changed = overlay.write(arguments.drafter, arguments.to, keys)
    return _show_fit(arguments, arguments.to, {"changed": changed}, [f"{arguments.to}"])


def _show_fit(arguments: argparse.Namespace, drafter: Path, content: dict[str, Any], lines: list[str]) -> int:
    verdict = _verdict(arguments, drafter)
    _print(arguments, {**content, **verdict.to_json()}, "\n".join([*lines, *verdict.lines()]))
    if verdict.refuse:
        raise RigctlError(f"{drafter} does not fit {arguments.target}: {'; '.join(verdict.refuse)}")
    return 0


def _pairs(arguments: argparse.Namespace) -> int:
    """A line a pair; exit code 1 if a unit may not use one of them."""
    refused = []
    for pair in DrafterPairs.parse_text(arguments.pairs, "order of pairs").pairs:
        found = judge(pair, write=arguments.write)
        word = found["error"] or found["verdict"]["verdict"]
        _print(arguments, found, f"{found['name']}: {word}")
        refused += [found["error"]] if found["error"] else []
    if refused:
        raise RigctlError("; ".join(refused))
    return 0


def _print(arguments: argparse.Namespace, content: dict[str, Any], text: str) -> None:
    try:
        print(json.dumps(content) if arguments.json else text, flush=True)
    except BrokenPipeError:
        # the reader went away (`| head`): no traceback, and none at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


Options = dict[str, dict[str, Any]]
SWITCH: dict[str, Any] = {"action": "store_true"}
PATH: dict[str, Any] = {"type": Path, "required": True}
NAME: Options = {"name": {}}
NAMES: Options = {"names": {"nargs": "*"}}
EVERY: Options = {"--every": {"type": float, "default": 10.0, "help": "seconds between progress lines"}}
OF_JOB: Options = {**NAME, "--spec": {**PATH, "help": "the job's JSON"}, **EVERY}
OF_PAIR: Options = {
    "--target": PATH,
    "--target-name": {"help": "the target's name in the inventory"},
    "--drafter": PATH,
    "--engine": {"choices": ("vllm", "sglang"), "required": True},
    "--version": {"required": True},
    "--env": {"type": Path, "help": "the engine's environment, whose registry must know the drafter"},
    "--method": {"choices": WITH_DRAFTER, "default": WITH_DRAFTER[0]},
    "--context": {"type": int, "required": True, "help": "maximum model length in tokens"},
    "--training": {"type": Path, "help": "JSON: target, convention, layer_ids, accept_mismatch, notes"},
}
ACTIONS: dict[str, tuple[Callable[[argparse.Namespace], int], str, Options]] = {
    "stage": (
        _stage,
        "Fetch a checkpoint, or confirm or adopt the one that is there.",
        {**OF_JOB, "--plan": {**SWITCH, "help": "say what would be fetched, fetch nothing"}},
    ),
    "repair": (
        lambda arguments: _job(arguments, lambda job: job.repair(in_place=arguments.in_place)),
        "Verify in full and fetch only what is wrong.",
        {**OF_JOB, "--in-place": {**SWITCH, "help": "allow writing into a directory that is not ours"}},
    ),
    "adopt": (
        lambda arguments: _job(arguments, lambda job: job.adopt()),
        "Verify a directory that is there and record it; it is never changed.",
        OF_JOB,
    ),
    "follow": (_follow, "Show a running job until it ends; exit code as the job's.", {**NAME, **EVERY}),
    "status": (_status, "State, size, revision and last verification of each checkpoint.", NAMES),
    "verify": (_verify, "Quick check against the last full one, or --full by digest.", {**NAMES, "--full": SWITCH}),
    "forget": (_forget, "Remove the record of a checkpoint; no file of it is touched.", NAME),
    "structure": (
        _structure,
        "Check shards, index, tokenizer and code files, by headers.",
        {"directory": {"type": Path}, "--kind": {"choices": ("target", "drafter"), "default": "target"}},
    ),
    "fit": (
        lambda arguments: _show_fit(arguments, arguments.drafter, {}, []),
        "Check a drafter against its target on an engine release.",
        OF_PAIR,
    ),
    "overlay": (
        _overlay,
        "Make a drafter directory with the layer ids this engine must read.",
        {**OF_PAIR, "--to": PATH},
    ),
    "pairs": (
        _pairs,
        "Validate what configurations draft with before their units are written.",
        {
            "pairs": {"help": "the order in JSON, as the deploy makes it (rigctl/contract/served_checkpoints.py)"},
            "--write": {**SWITCH, "help": "make the overlays that they need"},
        },
    ),
}
