"""Where a setting stands on the host as it runs: live, staged for a reboot, or yet to be applied. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from rig.facts.host import HostFacts
from rig.settings import Kind, Setting, kernel_token


class Standing(StrEnum):
    """A setting against the running host."""

    LIVE = "live"
    STAGED = "staged, waits for a reboot"
    PENDING = "to be applied"
    UNKNOWN = "not known"
    AT_START = "at each start of an engine"
    EXPLAINED = "not applied"


def standing(setting: Setting, facts: HostFacts) -> Standing:
    """Compare one setting with the facts."""
    if not setting.applied:
        return Standing.EXPLAINED
    match setting.kind:
        case Kind.KERNEL_ARGUMENT:
            if facts.command_line is None:
                return Standing.UNKNOWN
            return _live_or_staged(setting, kernel_token(setting) in facts.command_line, facts)
        case Kind.MODULE_OPTION:
            module, _, option = setting.name.partition(".")
            value = facts.parameter(module, option)
            return Standing.UNKNOWN if value is None else _live_or_staged(setting, same(value, setting.value), facts)
        case Kind.SYSCTL:
            value = facts.sysctls.get(setting.name)
            return _live(value is not None, same(value, setting.value))
        case Kind.GOVERNOR:
            return _live(bool(facts.cpu.governors), facts.cpu.governors == (setting.value,))
        case Kind.DISK_SCHEDULER:
            disks = [disk for path in facts.paths.values() for disk in path.disks if disk.name.startswith(setting.name)]
            return _live(bool(disks), all(disk.scheduler == setting.value for disk in disks))
        case Kind.POWER_LIMIT:
            limits = [gpu.power_limit_w for gpu in facts.gpus]
            return _live(None not in limits, all(limit == float(setting.value or 0) for limit in limits))
        case Kind.BOOT_UNIT:
            return _boot_unit(setting, facts)
        case _:
            return Standing.AT_START


def reboot_pending(settings: Iterable[Setting], facts: HostFacts) -> list[Setting]:
    """The applied settings that the running kernel or driver does not have: no serving unit starts before they do.

    An option of a module that is not loaded counts as had: it takes effect when the module loads.
    """
    waiting = (Standing.STAGED, Standing.PENDING)
    return [one for one in settings if one.needs_reboot and standing(one, facts) in waiting]


def same(live: str | None, wanted: str | None) -> bool:
    """Equal as text, or as numbers in any notation: the driver shows 0x00 as 0."""
    if live == wanted:
        return True
    try:
        return int(live or "", 0) == int(wanted or "", 0)
    except ValueError:
        return False


def _live(known: bool, equal: bool) -> Standing:
    if not known:
        return Standing.UNKNOWN
    return Standing.LIVE if equal else Standing.PENDING


def _live_or_staged(setting: Setting, live: bool, facts: HostFacts) -> Standing:
    if live:
        return Standing.LIVE
    text = kernel_token(setting) if setting.kind is Kind.KERNEL_ARGUMENT else setting.name.partition(".")[2]
    active = (
        line for one in facts.boot_files.values() for line in one.splitlines() if not line.lstrip().startswith("#")
    )
    return Standing.STAGED if any(text in line for line in active) else Standing.PENDING


def _boot_unit(setting: Setting, facts: HostFacts) -> Standing:
    if setting.name == "kimi-acs.service":
        known = [bridge.redirects for bridge in facts.bridges.values() if bridge.redirects is not None]
        return _live(bool(known), not any(known))
    unit = facts.units.get(setting.name)
    if unit is not None:
        return _live(True, unit.active)
    return _live(bool(facts.units), False)
