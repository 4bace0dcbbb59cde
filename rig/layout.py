"""Where things lie on a host. The three paths an operator may move are group data (all.py); these are ours."""

from __future__ import annotations

INSTALL = "/opt/kimi-rig"
HOSTKIT = f"{INSTALL}/hostkit"
RIGCTL = f"{HOSTKIT}/current/bin/rigctl"
RIGCTL_LINK = "/usr/local/bin/rigctl"

ETC = "/etc/kimi-rig"
CONFIGURATIONS = f"{ETC}/configurations"
CREDENTIALS = f"{ETC}/credentials"
LOCKS = f"{ETC}/locks"
PATCHES = f"{ETC}/patches"

STATE = "/var/lib/kimi-rig"
RECEIPT = f"{STATE}/receipt.json"
PROOFS = f"{STATE}/proofs"
"""Command lines that an engine's own parser has accepted, by digest."""
CREATED = f"{STATE}/created"
"""Append-only list of what we brought to the host; uninstall removes these and nothing else."""

REBOOT_PENDING = "/run/kimi-rig/reboot-pending"

UNITS = "/etc/systemd/system"
UNIT_MARK = "# Written by kimi-rig"
CACHE = "/var/cache/kimi-rig"
FALLBACK_UNIT = "kimi-fallback@.service"


def unit_name(configuration: str) -> str:
    """The systemd unit of a serving configuration."""
    return f"kimi-{configuration}.service"
