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
from rigctl.contract import layout
from rigctl.contract.confinement import confined

POLL_SECONDS = 1.0
REPORT_SECONDS = float(os.environ.get("KIMI_RIG_REPORT_SECONDS", "15"))
# One look takes milliseconds; a dead connection is noticed after this, instead of never (paramiko has no such limit).
LOOK_SECONDS = 30


@dataclass(frozen=True)
class LongJob:
    """A job on the host.

    unit: name of its transient unit; carries a digest of the inputs, so that another job is another unit.
    argv: what runs, as root. proof: an sh condition that holds once the product is whole.
    writes: directories besides /run and our state, made where they are missing; None: wherever an operator's data may
    lie. network: a key of NETWORKS. watches: it looks into processes of others, and at GPUs. limit_seconds: after this
    systemd ends it.
    """

    unit: str
    argv: Sequence[str]
    proof: str
    writes: Sequence[str] | None
    network: str = "none"
    watches: bool = False
    limit_seconds: int = 3600
    environment: Mapping[str, str] = field(default_factory=dict)
    properties: Sequence[str] = ()

    def options(self) -> list[str]:
        """Options of systemd-run for its unit."""
        return [
            *confined(self.unit, self.writes, self.network, watches=self.watches, more=self.properties),
            f"--property=RuntimeMaxSec={self.limit_seconds}",
            *(f"--setenv={name}={value}" for name, value in self.environment.items()),
        ]


def run(job: LongJob) -> Commands:
    """Commands of an operation that start `job` unless it runs already, follow it, and fail unless the proof holds."""
    unit = shlex.quote(job.unit)
    start = shlex.join(["systemd-run", *job.options(), "--", *job.argv])
    yield script(
        shlex.join(["mkdir", "-p", layout.STATE, *(job.writes or ())]),
        f"if ! systemctl is-active -q {unit}; then systemctl reset-failed {unit} 2>/dev/null || true; {start}; fi",
    )
    yield from followed(job.unit, job.proof)


def followed(unit: str, proof: str) -> Commands:
    """Commands that follow a unit, if it is at work, to its end, and fail unless the proof holds."""
    _follow(unit)
    name = shlex.quote(unit)
    said = f"journalctl -q -n 15 -o cat _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {name}) >&2"
    failed = f"{unit} did not finish its work: see `journalctl -u {unit}` on the host"
    yield script(f"( {proof} ) || {{ {said}; echo {shlex.quote(failed)} >&2; exit 1; }}")


def _follow(unit: str) -> None:
    """Wait until the job is at its end, and say every few seconds what it does."""
    begun, said, heard = time.monotonic(), 0.0, False
    while (state := _look(unit)).active:
        waited = time.monotonic() - begun
        # The first line is shown at once: of a staging it is the estimate.
        if waited - said >= REPORT_SECONDS or (state.last and not heard):
            said, heard = waited, heard or bool(state.last)
            logger.info(f"{host.print_prefix}{operation_name()}: {waited:.0f} s: {state.last or 'at work'}")
        time.sleep(POLL_SECONDS)


def _look(unit: str) -> Job:
    return host.get_fact(JobState, unit=unit, _timeout=LOOK_SECONDS)
