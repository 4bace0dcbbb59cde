"""What transient units of ours may do (systemd.exec(5)): those of root's own here, what others wrote in builder.py."""

import json
from collections.abc import Mapping, Sequence

from rigctl.contract import layout

SANDBOX = (
    "NoNewPrivileges=yes",
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
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged",
    "SystemCallErrorNumber=EPERM",
)
"""Properties of every transient unit."""
# What others wrote runs as the builder, in units of its own; here root gives it orders and takes what it made.
FILES = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER"
ROOT = ("UMask=0022", "MemoryDenyWriteExecute=yes", "SystemCallFilter=@chown")
DEVICES = ("DevicePolicy=closed", *(f"DeviceAllow=char-{name} rw" for name in ("nvidia", "nvidiactl", "nvidia-uvm")))
NETWORKS: Mapping[str, Sequence[str]] = {
    "none": ("PrivateNetwork=yes", "IPAddressDeny=any", "RestrictAddressFamilies=AF_UNIX"),
    "loopback": ("IPAddressDeny=any", "IPAddressAllow=localhost", "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"),
    "any": ("RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",),
}


def confined(
    unit: str, writes: Sequence[str] | None, network: str, *, watches: bool = False, more: Sequence[str] = ()
) -> list[str]:
    """Options of systemd-run for a unit of root's.

    writes: directories besides /run and our state; None: wherever an operator's data may lie. network: a key of
    NETWORKS. watches: it looks into processes of others, and at GPUs. more: further properties.
    """
    where = ["ProtectSystem=full"]
    if writes is not None:
        # systemd takes a blank for the next path; a quoted one may hold any.
        paths = " ".join(json.dumps(path) for path in ("/run", layout.STATE, *writes))
        where = ["ProtectSystem=strict", f"ReadWritePaths={paths}", "ProtectHome=read-only"]
    seen = [f"CapabilityBoundingSet={FILES} CAP_SYS_PTRACE", *DEVICES] if watches else []
    alone = [f"CapabilityBoundingSet={FILES}", "PrivateDevices=yes", "ProtectProc=invisible"]
    properties = [*SANDBOX, *ROOT, *where, *NETWORKS[network], *(seen or alone), *more]
    return ["--quiet", f"--unit={unit}", *(f"--property={each}" for each in properties)]
