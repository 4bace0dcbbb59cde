"""Where a setting stands on the host as it runs: live, staged for a reboot, or yet to be applied. Pure."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from rig.facts.host import HostFacts
from rig.host.settings import ACS_UNIT, Kind, Setting, kernel_token
from rigctl.contract.comparison import same_value


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
    compare = _COMPARE.get(setting.kind)
    return Standing.AT_START if compare is None else compare(setting, facts)


def reboot_pending(settings: Iterable[Setting], facts: HostFacts) -> list[Setting]:
    """The applied settings that the running kernel or driver does not have: no serving unit starts before they do.

    An option of a module that is not loaded counts as had: it takes effect when the module loads.
    """
    waiting = (Standing.STAGED, Standing.PENDING)
    return [one for one in settings if one.needs_reboot and standing(one, facts) in waiting]


def _live(known: bool, equal: bool) -> Standing:
    if not known:
        return Standing.UNKNOWN
    return Standing.LIVE if equal else Standing.PENDING


def _kernel_argument(setting: Setting, facts: HostFacts) -> Standing:
    if facts.command_line is None:
        return Standing.UNKNOWN
    token = kernel_token(setting)
    return Standing.LIVE if token in facts.command_line else _staged(token, facts)


def _module_option(setting: Setting, facts: HostFacts) -> Standing:
    module, _, option = setting.name.partition(".")
    value = facts.parameter(module, option)
    if value is None:
        return Standing.UNKNOWN
    return Standing.LIVE if same_value(value, setting.value) else _staged(f"{option}=", facts)


def _staged(text: str, facts: HostFacts) -> Standing:
    """Whether an uncommented line of the boot loader's or modprobe's files has it."""
    lines = (line.strip() for one in facts.boot_files.values() for line in one.splitlines())
    found = any(text in line for line in lines if not line.startswith("#"))
    return Standing.STAGED if found else Standing.PENDING


def _value(live: str | None, setting: Setting) -> Standing:
    return _live(live is not None, same_value(live, setting.value))


def _disk_scheduler(setting: Setting, facts: HostFacts) -> Standing:
    disks = [disk for path in facts.paths.values() for disk in path.disks if disk.name.startswith(setting.name)]
    return _live(bool(disks), all(disk.scheduler == setting.value for disk in disks))


def _boot_unit(setting: Setting, facts: HostFacts) -> Standing:
    unit = facts.units.get(setting.name)
    undone = setting.name == ACS_UNIT and any(bridge.redirects for bridge in facts.bridges.values())
    return _live(bool(facts.units), unit is not None and unit.active and not undone)


_COMPARE: Mapping[Kind, Callable[[Setting, HostFacts], Standing]] = {
    Kind.KERNEL_ARGUMENT: _kernel_argument,
    Kind.MODULE_OPTION: _module_option,
    Kind.SYSCTL: lambda setting, facts: _value(facts.sysctls.get(setting.name), setting),
    Kind.GOVERNOR: lambda setting, facts: _live(bool(facts.cpu.governors), facts.cpu.governors == (setting.value,)),
    Kind.DISK_SCHEDULER: _disk_scheduler,
    Kind.POWER_LIMIT: lambda setting, facts: _live(
        all(gpu.power_limit_w is not None for gpu in facts.gpus),
        all(gpu.power_limit_w == float(setting.value or 0) for gpu in facts.gpus),
    ),
    Kind.BOOT_UNIT: _boot_unit,
}
