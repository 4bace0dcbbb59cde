"""Long jobs as transient systemd units on the host: started once, followed with progress, validated by their product.

A job survives a lost connection; the next deploy finds it at work and follows it (pyinfra knows no such thing: an
operation's time limit leaves its command running, and a retry starts a second one).
"""

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyinfra import host, logger

from rig.facts.state import Job, JobState
from rig.operations.common import Commands, operation_name, script
from rigctl.contract import layout

POLL_SECONDS = 1.0
REPORT_SECONDS = float(os.environ.get("KIMI_RIG_REPORT_SECONDS", "15"))
# One look takes milliseconds; a dead connection is noticed after this, instead of never (paramiko has no such limit).
LOOK_SECONDS = 30


# What others wrote runs as the builder, in units of its own; here root gives it orders and takes what it made.
FILES = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER"
SANDBOX = (
    "NoNewPrivileges=yes",
    "UMask=0022",
    "PrivateTmp=yes",
    "PrivateMounts=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "KeyringMode=private",
    "LockPersonality=yes",
    "MemoryDenyWriteExecute=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged",
    "SystemCallFilter=@chown",
    "SystemCallErrorNumber=EPERM",
)
"""Properties of every unit that a deploy starts as root."""
DEVICES = ("DevicePolicy=closed", *(f"DeviceAllow=char-{name} rw" for name in ("nvidia", "nvidiactl", "nvidia-uvm")))
NETWORKS: Mapping[str, Sequence[str]] = {
    "none": ("PrivateNetwork=yes", "IPAddressDeny=any", "RestrictAddressFamilies=AF_UNIX"),
    "loopback": ("IPAddressDeny=any", "IPAddressAllow=localhost", "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"),
    "any": ("RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",),
}


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


def confined(
    unit: str, writes: Sequence[str] | None, network: str, *, watches: bool = False, more: Sequence[str] = ()
) -> list[str]:
    """Options of systemd-run for a unit of root's; see LongJob."""
    where = ["ProtectSystem=full"]
    if writes is not None:
        # systemd takes a blank for the next path; a quoted one may hold any.
        paths = " ".join(json.dumps(path) for path in ("/run", layout.STATE, *writes))
        where = ["ProtectSystem=strict", f"ReadWritePaths={paths}", "ProtectHome=read-only"]
    seen = [f"CapabilityBoundingSet={FILES} CAP_SYS_PTRACE", *DEVICES] if watches else []
    alone = [f"CapabilityBoundingSet={FILES}", "PrivateDevices=yes", "ProtectProc=invisible"]
    properties = [*SANDBOX, *where, *NETWORKS[network], *(seen or alone), *more]
    return ["--quiet", f"--unit={unit}", *(f"--property={each}" for each in properties)]


def run(job: LongJob) -> Commands:
    """Commands of an operation that start `job` unless it runs already, follow it, and fail unless the proof holds."""
    unit = shlex.quote(job.unit)
    start = shlex.join(["systemd-run", *job.options(), "--", *job.argv])
    yield script(
        shlex.join(["mkdir", "-p", layout.STATE, *(job.writes or ())]),
        f"if ! systemctl is-active -q {unit}; then systemctl reset-failed {unit} 2>/dev/null || true; {start}; fi",
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
