"""A host's settings as files: what stands in each, and what makes the system read it. Pure."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rig.catalog.entries import ROOT
from rig.facts.host import HostFacts, parse_command_line
from rig.host.settings import ACS_UNIT, HostSettings
from rigctl.contract import layout

# layout.UNIT_MARK is for serving units alone: what carries it is removed with its configuration.
HEADER = "# kimi-rig, host stage. Changes here are overwritten; `make explain` says why each line is there.\n"

GRUB_DROP_IN = "/etc/default/grub.d/90-kimi-rig.cfg"
KERNEL_CMDLINE = "/etc/kernel/cmdline"
OUR_ARGUMENTS = f"{layout.STATE}/kernel-arguments"
"""What of KERNEL_CMDLINE is ours: the file has no room for comments."""
MODPROBE = "/etc/modprobe.d/kimi-rig.conf"
SYSCTL = "/etc/sysctl.d/90-kimi-rig.conf"
TMPFILES = "/etc/tmpfiles.d/kimi-rig.conf"
UDEV = "/etc/udev/rules.d/60-kimi-rig.rules"
GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
NEEDRESTART = "/etc/needrestart/conf.d/kimi-rig.conf"
ENTRIES = "$(ls -d /boot/loader/entries/*.conf /boot/efi/loader/entries/*.conf /efi/loader/entries/*.conf 2>/dev/null)"
ACS_SCRIPT = f"{layout.INSTALL}/libexec/kimi-acs"
POWER_UNIT = "kimi-power-limit.service"

# Before anything uses a GPU, at every boot: the firmware sets ACS anew each time.
ACS_UNIT_TEXT = f"""{HEADER}[Unit]
Description=Peer traffic between GPUs is not redirected to the root (PCIe ACS)
Documentation=https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
ConditionVirtualization=no
Before=nvidia-persistenced.service multi-user.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={ACS_SCRIPT}
TimeoutStartSec=60
NoNewPrivileges=yes
CapabilityBoundingSet=CAP_SYS_ADMIN CAP_SYS_RAWIO
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateNetwork=yes

[Install]
WantedBy=multi-user.target
"""
# Once the persistence daemon holds the driver. WATTS stands for the number.
POWER_UNIT_TEXT = f"""{HEADER}[Unit]
Description=Power limit of the GPUs: WATTS W
Wants=nvidia-persistenced.service
After=nvidia-persistenced.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-smi --power-limit=WATTS
TimeoutStartSec=60

[Install]
WantedBy=multi-user.target
"""
# Perl: an upgraded library must not restart an engine that loads for half an hour. Ubuntu's needrestart restarts
# services by itself, also after an unattended upgrade (needrestart.conf, override_rc).
NEEDRESTART_TEXT = f"{HEADER}$nrconf{{override_rc}}{{qr(^kimi-)}} = 0;\n1;\n"
# What may stand unquoted in a boot loader's, the kernel's and modprobe's files.
SAFE = re.compile(r"[A-Za-z0-9_.,:;=/@+-]+")


class HostFileError(Exception):
    """A value that must not be written to a system file: says which and why."""


@dataclass(frozen=True)
class HostFile:
    """A file of ours on the host.

    refresh: the command that makes the system take it over, now or for the next boot. stale: an sh condition that
    holds while the system has not: found by its state, so that a refresh an earlier deploy owed is never lost.
    """

    path: str
    text: str
    refresh: str = ""
    stale: str = ""
    mode: str = "0644"


def host_files(settings: HostSettings, facts: HostFacts) -> list[HostFile]:
    """Every file the settings need.

    Raises HostFileError for a value that would break out of its line.
    """
    files = [*_boot_files(settings, facts)]
    if settings.module_options:
        # Values with a semicolon are quoted, as the driver's documentation does for RegistryDwords.
        lines = (
            f"options {_safe(module)} {_safe(name)}={_quoted(value)}\n"
            for module, values in settings.module_options.items()
            for name, value in values.items()
        )
        older = f"find /boot -maxdepth 1 -name 'initrd.img-*' ! -newer {MODPROBE} | grep -q ."
        files.append(HostFile(MODPROBE, HEADER + "".join(lines), "update-initramfs -u -k all", older))
    if settings.sysctls:
        lines = (f"{_safe(name)} = {_safe(value)}\n" for name, value in settings.sysctls.items())
        differs = " || ".join(f'[ "$(sysctl -n {name})" != {value} ]' for name, value in settings.sysctls.items())
        files.append(HostFile(SYSCTL, HEADER + "".join(lines), f"sysctl -q -p {SYSCTL}", differs))
    if settings.governor:
        # systemd-tmpfiles writes the governor of every CPU at boot ("w" takes globs).
        text = f"{HEADER}w {GOVERNORS} - - - - {_safe(settings.governor)}\n"
        other = f"grep -hvx {settings.governor} {GOVERNORS} | grep -q ."
        files.append(HostFile(TMPFILES, text, f"systemd-tmpfiles --create {TMPFILES}", other))
    if settings.disk_scheduler:
        # For whole disks: partitions have no queue of their own.
        lines = (
            f'ACTION=="add|change", SUBSYSTEM=="block", ENV{{DEVTYPE}}=="disk", KERNEL=="{_safe(name)}[0-9]*", '
            f'ATTR{{queue/scheduler}}="{_safe(scheduler)}"\n'
            for name, scheduler in settings.disk_scheduler.items()
        )
        refresh = "udevadm control --reload && udevadm trigger --settle --subsystem-match=block --action=change"
        other = " || ".join(
            f"grep -hvF '[{scheduler}]' /sys/block/{name}*/queue/scheduler | grep -q ."
            for name, scheduler in settings.disk_scheduler.items()
        )
        files.append(HostFile(UDEV, HEADER + "".join(lines), refresh, other))
    if ACS_UNIT in settings.boot_units:
        script = (ROOT / "files" / "host" / "kimi-acs").read_text()
        files.append(HostFile(ACS_SCRIPT, script, mode="0755"))
        files.append(HostFile(f"{layout.UNITS}/{ACS_UNIT}", ACS_UNIT_TEXT))
    if settings.power_limit_w is not None:
        files.append(
            HostFile(f"{layout.UNITS}/{POWER_UNIT}", POWER_UNIT_TEXT.replace("WATTS", str(settings.power_limit_w)))
        )
    if "needrestart" in facts.packages:
        files.append(HostFile(NEEDRESTART, NEEDRESTART_TEXT))
    return files


def unwanted_files(wanted: Iterable[HostFile]) -> list[str]:
    """Paths of ours that the settings no longer need. KERNEL_CMDLINE is the system's and never removed."""
    ours = [GRUB_DROP_IN, MODPROBE, SYSCTL, TMPFILES, UDEV, NEEDRESTART, ACS_SCRIPT]
    ours += [f"{layout.UNITS}/{unit}" for unit in (ACS_UNIT, POWER_UNIT)]
    kept = {one.path for one in wanted}
    return [path for path in ours if path not in kept]


def _boot_files(settings: HostSettings, facts: HostFacts) -> Iterator[HostFile]:
    tokens, previous = settings.kernel_arguments, facts.our_arguments
    if facts.boot_loader == "grub" and tokens:
        absent = f"! grep -qF -- {shlex.quote(' '.join(tokens))} /boot/grub/grub.cfg"
        # Read after /etc/default/grub. The _DEFAULT variable comes last, and the recovery entry does not have it.
        arguments = " ".join(map(_safe, tokens))
        text = f'{HEADER}GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT {arguments}"\n'
        yield HostFile(GRUB_DROP_IN, text, "update-grub 2>/dev/null", absent)
    if facts.boot_loader == "systemd-boot" and (tokens or previous):
        # The running kernel's arguments, without those the boot loader itself adds.
        booted = (each for each in facts.command_line or () if not each.startswith(("BOOT_IMAGE=", "initrd=")))
        current = facts.boot_files.get(KERNEL_CMDLINE) or " ".join(booted)
        # kernel-install writes the entry of each installed kernel anew from this file.
        refresh = 'for k in /boot/vmlinuz-*; do kernel-install add "${k#/boot/vmlinuz-}" "$k"; done'
        wanted = " ".join(tokens)
        absent = f"grep -L -F -- {shlex.quote(wanted)} {ENTRIES} | grep -q ."
        yield HostFile(KERNEL_CMDLINE, merge_command_line(current, tokens, previous), refresh, absent if tokens else "")
        yield HostFile(OUR_ARGUMENTS, wanted + "\n")


def merge_command_line(text: str, tokens: Iterable[str], previous: Iterable[str] = ()) -> str:
    """One line: the arguments that stand there, without the previous ones of ours, then ours.

    An argument of the operator's stays also where ours contradicts it: the kernel takes the later one.
    """
    ours = [_safe(token) for token in tokens]
    mine = {*ours, *previous}
    return " ".join([*(token for token in parse_command_line(text) or () if token not in mine), *ours]) + "\n"


def _safe(word: str) -> str:
    if not SAFE.fullmatch(word):
        raise HostFileError(f"{word!r} must not stand in a system file: letters, digits and .,:;=/@_+- are allowed")
    return word


def _quoted(value: str) -> str:
    return f'"{_safe(value)}"' if ";" in value else _safe(value)
