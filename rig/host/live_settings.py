"""Where a setting stands on the host as it runs: live, staged for a reboot, or yet to be applied. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from rig.facts.host import HostFacts
from rig.host.settings import ACS_UNIT, Confidence, Kind, Setting, kernel_token
from rig.host.situation import configured
from rigctl.contract.comparison import same_value


class Standing(StrEnum):
    """A setting against the running host."""

    LIVE = "live"
    STAGED = "staged, waits for a reboot"
    PENDING = "to be applied"
    UNKNOWN = "not known"
    AT_START = "at each start of an engine"
    KEPT = "live, not ours: kept"
    EXPLAINED = "not applied"


def standing(setting: Setting, facts: HostFacts) -> Standing:
    """Compare one setting with the facts."""
    if not setting.applied:
        return Standing.KEPT if setting.kept else Standing.EXPLAINED
    compare = _COMPARE.get(setting.kind)
    return Standing.AT_START if compare is None else compare(setting, facts)


def reboot_pending(settings: Iterable[Setting], facts: HostFacts) -> list[Setting]:
    """The applied settings that the running kernel or driver does not have.

    An option of a module that is not loaded counts as had: it takes effect when the module loads.
    """
    waiting = (Standing.STAGED, Standing.PENDING)
    return [one for one in settings if one.needs_reboot and standing(one, facts) in waiting]


def reboot_recommended(settings: Iterable[Setting], facts: HostFacts) -> list[Setting]:
    """Those of them that stop nothing: the policy wants them, and an engine was accepted on this boot without them.

    What the operator asks for, and what correctness needs, is waited for also then.
    """
    pending = reboot_pending(settings, facts) if facts.accepted else []
    return [one for one in pending if not one.needed and one.confidence is not Confidence.OPERATOR]


def reboot_needed(settings: Iterable[Setting], facts: HostFacts) -> list[Setting]:
    """Those of them before which no serving unit starts."""
    settings = list(settings)
    later = reboot_recommended(settings, facts)
    return [one for one in reboot_pending(settings, facts) if one not in later]


def _live(known: bool, equal: bool) -> Standing:
    if not known:
        return Standing.UNKNOWN
    return Standing.LIVE if equal else Standing.PENDING


def _kernel_argument(setting: Setting, facts: HostFacts) -> Standing:
    if facts.command_line is None:
        return Standing.UNKNOWN
    token = kernel_token(setting)
    if token in facts.command_line:
        return Standing.LIVE
    lines = (line.strip() for text in facts.boot_files.values() for line in text.splitlines())
    word = re.compile(rf"(?<![\w.-]){re.escape(token)}(?![\w.,-])")
    return _staged(any(word.search(line) for line in lines if not line.startswith("#")))


def _module_option(setting: Setting, facts: HostFacts) -> Standing:
    module, _, option = setting.name.partition(".")
    value = facts.parameter(module, option)
    if value is None:
        return Standing.UNKNOWN
    if same_value(value, setting.value):
        return Standing.LIVE
    files = configured(facts, module, option)
    return _staged(bool(files) and same_value(files[-1][1], setting.value))


def _staged(found: bool) -> Standing:
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
