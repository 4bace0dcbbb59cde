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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rigctl.errors import RigctlError
from rigctl.whole_files import read_json, write_json

if TYPE_CHECKING:
    from rigctl.contract.checkpoint_job import CheckpointJob

FOLLOW_EVERY = 1.0  # seconds between two looks at a running job
FOLLOW_GRACE = 5.0  # seconds a job may take to begin, or to write its last status


def register(subparsers: Any) -> None:
    """Add the subcommands; everything heavy is imported when one runs."""
    parser = subparsers.add_parser("checkpoints", help="model and drafters: stage, prove, repair, fit")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_jobs(actions)
    _add_records(actions)
    _add_checks(actions)


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of text")
    parser.set_defaults(run=run)
    return parser


def _add_jobs(actions: Any) -> None:
    stage = _add(actions, "stage", _stage, "Fetch a checkpoint, or confirm or adopt the one that is there.")
    stage.add_argument("name")
    stage.add_argument("--spec", type=Path, required=True, help="the job's JSON")
    stage.add_argument("--plan", action="store_true", help="say what would be fetched, fetch nothing")
    stage.add_argument("--every", type=float, default=10.0, help="seconds between progress lines")
    repair = _add(actions, "repair", _repair, "Verify in full and fetch only what is wrong.")
    repair.add_argument("name")
    repair.add_argument("--spec", type=Path, required=True)
    repair.add_argument("--in-place", action="store_true", help="allow writing into a directory that is not ours")
    repair.add_argument("--every", type=float, default=10.0)
    adopt = _add(actions, "adopt", _adopt, "Verify a directory that is there and record it; it is never changed.")
    adopt.add_argument("name")
    adopt.add_argument("--spec", type=Path, required=True)
    adopt.add_argument("--every", type=float, default=10.0)
    follow = _add(actions, "follow", _follow, "Show a running job until it ends; exit code as the job's.")
    follow.add_argument("name")
    follow.add_argument("--every", type=float, default=10.0)
    pin = _add(actions, "pin", _pin, "Write the manifest of a spec's source.")
    pin.add_argument("--spec", type=Path, required=True)
    pin.add_argument("--output", type=Path, required=True)


def _add_records(actions: Any) -> None:
    status = _add(actions, "status", _status, "State, size, revision and last verification of each checkpoint.")
    status.add_argument("names", nargs="*")
    verify = _add(actions, "verify", _verify, "Quick check against the last full one, or --full by digest.")
    verify.add_argument("names", nargs="*")
    verify.add_argument("--full", action="store_true")
    verify.add_argument("--threads", type=int, help="default: one a core")
    forget = _add(actions, "forget", _forget, "Remove the record of a checkpoint; no file of it is touched.")
    forget.add_argument("name")


def _add_checks(actions: Any) -> None:
    structure = _add(actions, "structure", _structure, "Check shards, index, tokenizer and code files, by headers.")
    structure.add_argument("directory", type=Path)
    structure.add_argument("--kind", choices=("target", "drafter"), default="target")
    fit = _add(actions, "fit", _fit, "Check a drafter against its target on an engine release.")
    _add_fit(fit)
    overlay = _add(actions, "overlay", _overlay, "Make a drafter directory with the layer ids this engine must read.")
    _add_fit(overlay)
    overlay.add_argument("--to", type=Path, required=True)

    pairs = _add(actions, "pairs", _pairs, "Judge the drafters of configurations before their units are written.")
    pairs.add_argument("pairs", help="the order in JSON, as the deploy makes it (rigctl/contract/drafter_pairs.py)")
    pairs.add_argument("--write", action="store_true", help="make the overlays that they need")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--target-name", help="the target's name in the inventory")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--architectures", help="drafter architectures of this build, comma separated")
    parser.add_argument("--context", type=int, required=True, help="maximum model length in tokens")
    parser.add_argument("--training", type=Path, help="JSON: target, convention, layer_ids, accept_mismatch, notes")


# -- jobs ----------------------------------------------------------------------------------------------------


def _order(arguments: argparse.Namespace) -> CheckpointJob:
    from rigctl.contract.checkpoint_job import CheckpointJob

    order = CheckpointJob.read(arguments.spec)
    if getattr(arguments, "name", order.name) != order.name:
        raise RigctlError(f"{arguments.spec} describes {order.name}, not {arguments.name}")
    return order


def _stage(arguments: argparse.Namespace) -> int:
    order = _order(arguments)
    if arguments.plan:
        return _plan(arguments, order)
    return _job(arguments, order, lambda job: job.stage())


def _repair(arguments: argparse.Namespace) -> int:
    return _job(arguments, _order(arguments), lambda job: job.repair(in_place=arguments.in_place))


def _plan(arguments: argparse.Namespace, order: CheckpointJob) -> int:
    from rigctl.checkpoints import record, staging
    from rigctl.checkpoints.progress import Progress

    job = staging.Job(order, record.from_environment(), Progress(order.name), threading.Event())
    manifest = job._manifest()
    if manifest is None:
        raise RigctlError(f"{order.name}: the size of {job.source.describe()} is known only when it is made")
    plan = job.plan(manifest)
    _print(arguments, plan.to_json(), plan.line())
    job.refuse_without_space(plan)
    return 0


def _job(arguments: argparse.Namespace, order: CheckpointJob, work: Callable[[Any], Any]) -> int:
    """Run one job with its status file; SIGTERM and SIGINT end it cleanly, what is fetched stays."""
    from rigctl.checkpoints import record, staging, workplace
    from rigctl.checkpoints.progress import Progress, Reporter

    state = record.from_environment()
    if workplace.is_locked(state, order.name):
        raise workplace.Busy(
            f"{order.name}: a job is running already; follow it with `rigctl checkpoints follow {order.name}`"
        )
    progress, stop = Progress(order.name), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    job = staging.Job(order, state, progress, stop)
    with Reporter(progress, state.job_path(order.name), as_json=arguments.json, every=arguments.every):
        try:
            outcome = work(job)
        except (RigctlError, OSError) as error:
            progress.state = "stopped" if stop.is_set() else "failed"
            progress.message = str(error)
            if isinstance(error, OSError):
                raise RigctlError(f"{order.name}: {error}") from error
            raise
        progress.state, progress.phase, progress.message = "done", "done", outcome.state
    content = {"outcome": outcome.state, "changed": outcome.changed, **_summary(outcome.record)}
    _print(arguments, content, f"{order.name}: {outcome.state} in {outcome.record.path}")
    return 0


def _adopt(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import staging

    order = _order(arguments)
    return _job(
        arguments,
        order,
        lambda job: staging.Outcome("adopted", True, staging.adopt_directory(order, job.state, job.progress)),
    )


def _follow(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import progress, record, workplace

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
    if status["state"] == "done":
        return 0
    if status["state"] == "running":
        raise RigctlError(f"{arguments.name}: the job was killed; run it again, it resumes")
    raise RigctlError(f"{arguments.name}: {status['state']}: {status['message']}")


def _pin(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import record, staging
    from rigctl.checkpoints.progress import Progress, human_bytes

    order = _order(arguments).model_copy(update={"manifest": None})
    manifest = staging.Job(order, record.from_environment(), Progress(order.name), threading.Event())._manifest()
    if manifest is None:
        raise RigctlError(f"{order.name}: a generator has no manifest before it ran")
    write_json(arguments.output, manifest.document())
    content = {"revision": manifest.revision, "files": len(manifest.files), "bytes": manifest.total}
    text = f"{arguments.output}: {len(manifest.files)} files, {human_bytes(manifest.total)}, {manifest.revision}"
    _print(arguments, content, text)
    return 0


# -- records -------------------------------------------------------------------------------------------------


def _summary(record: Any) -> dict[str, Any]:
    return {
        "name": record.name,
        "path": record.path,
        "kind": record.kind,
        "origin": record.origin,
        "source": record.manifest.source,
        "revision": record.manifest.revision,
        "identity": record.manifest.identity(),
        "bytes": record.manifest.total,
        "files": len(record.manifest.files),
        "verified_at": record.verified_at,
        "verified_seconds": record.verified_seconds,
        "foreign": record.foreign,
    }


def _status(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import record

    state = record.from_environment()
    names = arguments.names or state.names()
    for name in names:
        content = _state_of(state, name)
        _print(arguments, content, _status_line(content))
    if not names and not arguments.json:
        print(f"no checkpoint is recorded in {state.root}")
    return 0


def _state_of(state: Any, name: str) -> dict[str, Any]:
    """What is known of one checkpoint: running or interrupted job, record, quick verification."""
    from rigctl.checkpoints import workplace
    from rigctl.checkpoints.record import quick_report

    record = state.load(name)
    job = read_json(state.job_path(name), "status of the job") if state.job_path(name).exists() else None
    content: dict[str, Any] = {"name": name, "state": "unknown"}
    if record is not None:
        report = quick_report(record)
        content.update(_summary(record), quick=report.to_json(), state="complete" if report.complete else "damaged")
    if job is not None and workplace.is_locked(state, name):
        content.update(state="running", job=job)
    elif job is not None and job["state"] != "done":
        state_word = "interrupted" if job["state"] == "running" else job["state"]
        content.update(job={**job, "state": state_word})
        if record is None:
            content["state"] = state_word
    return content


def _status_line(content: dict[str, Any]) -> str:
    from rigctl.checkpoints import progress

    if content["state"] == "running":
        return f"{content['name']}: running: {progress.line(content['job'])}"
    if "path" not in content:
        job = content.get("job", {})
        return f"{content['name']}: {content['state']}" + (f": {job['message']}" if job.get("message") else "")
    verified = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content["verified_at"]))
    size = progress.human_bytes(content["bytes"])
    revision = content["revision"] or content["identity"][:12]
    return (
        f"{content['name']}: {content['state']}, {content['origin']}, {size} in {content['files']} files, "
        f"revision {revision}, verified {verified}, {content['path']}"
    )


def _verify(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import record

    state = record.from_environment()
    names = arguments.names or [name for name in state.names() if state.load(name) is not None]
    if not names:
        raise RigctlError(f"no checkpoint is recorded in {state.root}: there is nothing to verify")
    wrong = []
    for name in names:
        report = _verify_one(state, state.require(name), full=arguments.full, threads=arguments.threads)
        word = "complete" if report.complete else "NOT complete"
        how = "by digest" if arguments.full else "by size, mtime and inode"
        text = f"{name}: {word} {how}, {report.checked} files in {report.seconds:.2f} s"
        _print(
            arguments,
            {"name": name, "full": arguments.full, **report.to_json()},
            "\n  ".join([text, *report.lines()[:50]]),
        )
        if not report.complete:
            wrong.append(name)
    if wrong:
        raise RigctlError(
            f"{', '.join(wrong)}: not as proved; "
            + ("repair it" if arguments.full else "verify with --full, then repair what is damaged")
        )
    return 0


def _verify_one(state: Any, record: Any, *, full: bool, threads: int | None) -> Any:
    from rigctl.checkpoints import record as records
    from rigctl.checkpoints import verify

    root = Path(record.path)
    if not full:
        return records.quick_report(record)
    report = verify.full(root, record.manifest, threads=threads)
    report.foreign = verify.foreign_files(root, record.manifest) if root.is_dir() else []
    record.seen, record.damaged, record.foreign = report.seen, report.damaged, report.foreign
    record.verified_at, record.verified_seconds = records.now(), report.seconds
    state.save(record)
    return report


def _forget(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import record, workplace

    state = record.from_environment()
    known = state.require(arguments.name)
    with workplace.locked(state, arguments.name, Path(known.path)):
        state.record_path(arguments.name).unlink()
        state.job_path(arguments.name).unlink(missing_ok=True)
    _print(
        arguments,
        {"name": arguments.name, "forgotten": True},
        f"{arguments.name}: forgotten, {known.path} stays",
    )
    return 0


# -- checks --------------------------------------------------------------------------------------------------


def _structure(arguments: argparse.Namespace) -> int:
    from rigctl.checkpoints import structure

    started = time.monotonic()
    result = structure.check(arguments.directory, arguments.kind)
    seconds = time.monotonic() - started
    text = f"{arguments.directory}: {result.tensors} tensors in {result.shards} shards, {seconds:.2f} s"
    lines = [text, *(f"warning: {item}" for item in result.warnings)]
    _print(arguments, {"seconds": round(seconds, 3), **result.to_json()}, "\n  ".join(lines))
    if result.errors:
        raise RigctlError(f"{arguments.directory} cannot be loaded:\n  " + "\n  ".join(result.errors))
    return 0


def _verdict(arguments: argparse.Namespace) -> Any:
    from rigctl.checkpoints import fit
    from rigctl.contract.eagle3_conventions import Engine
    from rigctl.contract.served_checkpoints import Training

    content = read_json(arguments.training, "training") if arguments.training else {}
    known = tuple(arguments.architectures.split(",")) if arguments.architectures else None
    engine = Engine(arguments.engine, arguments.version, known)
    name = arguments.target_name
    training = Training.validated(content, f"training {arguments.training}")
    return fit.check(arguments.target, arguments.drafter, engine, arguments.context, training, name=name)


def _fit(arguments: argparse.Namespace) -> int:
    verdict = _verdict(arguments)
    _print(arguments, verdict.to_json(), "\n".join(verdict.lines()))
    if verdict.refuse:
        raise RigctlError(f"{arguments.drafter} does not fit {arguments.target}: {'; '.join(verdict.refuse)}")
    return 0


def _overlay(arguments: argparse.Namespace) -> int:
    """Write the overlay and check the pair as the engine will then see it."""
    from rigctl.checkpoints import overlay

    verdict = _verdict(arguments)
    if not verdict.keys:
        raise RigctlError(f"{arguments.drafter}: the layer ids it was trained with are not recorded: nothing to write")
    changed = overlay.write(arguments.drafter, arguments.to, verdict.keys)
    arguments.drafter = arguments.to
    after = _verdict(arguments)
    _print(arguments, {"changed": changed, **after.to_json()}, "\n".join([f"{arguments.to}", *after.lines()]))
    if after.refuse:
        raise RigctlError(f"{arguments.to} does not fit {arguments.target}: {'; '.join(after.refuse)}")
    return 0


def _pairs(arguments: argparse.Namespace) -> int:
    """A line a pair; exit code 1 if a unit may not use one of them."""
    from rigctl.checkpoints.precheck import judge
    from rigctl.contract.drafter_pairs import DrafterPairs

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
