"""Long jobs as transient systemd units on the host: started once, followed with progress, validated by their product.

A job survives a lost connection; the next deploy finds it at work and follows it (pyinfra knows no such thing: an
operation's time limit leaves its command running, and a retry starts a second one).
"""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyinfra import host, logger

from rig.facts.state import Job, JobState
from rig.operations.common import Commands, operation_name, script

POLL_SECONDS = 1.0
REPORT_SECONDS = float(os.environ.get("KIMI_RIG_REPORT_SECONDS", "15"))
# One look takes milliseconds; a dead connection is noticed after this, instead of never (paramiko has no such limit).
LOOK_SECONDS = 30


@dataclass(frozen=True)
class LongJob:
    """A job on the host.

    unit: name of its transient unit; carries a digest of the inputs, so that another job is another unit.
    argv: what runs, as root. proof: an sh condition that holds once the product is whole.
    limit_seconds: after this systemd ends it.
    """

    unit: str
    argv: Sequence[str]
    proof: str
    limit_seconds: int = 3600
    environment: Mapping[str, str] = field(default_factory=dict)
    properties: Sequence[str] = ()


def run(job: LongJob) -> Commands:
    """Commands of an operation that start `job` unless it runs already, follow it, and fail unless the proof holds."""
    unit = shlex.quote(job.unit)
    properties = [f"RuntimeMaxSec={job.limit_seconds}", *job.properties]
    options = [f"--property={value}" for value in properties]
    options += [f"--setenv={name}={value}" for name, value in job.environment.items()]
    start = shlex.join(["systemd-run", "--quiet", f"--unit={job.unit}", *options, "--", *job.argv])
    yield script(
        f"if ! systemctl is-active -q {unit}; then systemctl reset-failed {unit} 2>/dev/null || true; {start}; fi"
    )
    _follow(job)
    said = f"journalctl -q -n 15 -o cat _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {unit}) >&2"
    failed = f"{job.unit} did not finish its work: see `journalctl -u {job.unit}` on the host"
    yield script(f"( {job.proof} ) || {{ {said}; echo {shlex.quote(failed)} >&2; exit 1; }}")


def _follow(job: LongJob) -> None:
    """Wait until the job is at its end, and say every few seconds what it does."""
    begun, said, heard = time.monotonic(), 0.0, False
    while (state := _look(job)).active:
        waited = time.monotonic() - begun
        # The first line is shown at once: of a staging it is the estimate.
        if waited - said >= REPORT_SECONDS or (state.last and not heard):
            said, heard = waited, heard or bool(state.last)
            logger.info(f"{host.print_prefix}{operation_name()}: {waited:.0f} s: {state.last or 'at work'}")
        time.sleep(POLL_SECONDS)


def _look(job: LongJob) -> Job:
    return host.get_fact(JobState, unit=job.unit, _timeout=LOOK_SECONDS)
