"""The page an operator pins to the wall: what the host is, what was chosen for it, why, from where. Pure."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from rig.facts.host import Gpu, HostFacts
from rig.host.live_settings import Standing, reboot_pending, standing
from rig.host.settings import ENGINES, Kind, Setting
from rig.host.topology import Decision

WIDTH = 110
TITLES = {
    Kind.KERNEL_ARGUMENT: "Kernel arguments",
    Kind.MODULE_OPTION: "Driver module options",
    Kind.BOOT_UNIT: "Units at boot",
    Kind.SYSCTL: "Sysctls",
    Kind.LIMIT: "Limits of the serving units",
    Kind.GOVERNOR: "CPU governor",
    Kind.DISK_SCHEDULER: "Disk scheduler",
    Kind.POWER_LIMIT: "Power limit",
    Kind.ENVIRONMENT: "Environment of the engines",
    Kind.ENGINE_FLAG: "Flags of the engines",
    Kind.ATTENTION: "MLA attention backend",
    Kind.MEMORY_FRACTION: "GPU memory fraction, where a configuration names none",
}


def explain_json(name: str, facts: HostFacts, decision: Decision) -> dict[str, Any]:
    """The page as one JSON value; each setting an object with value, reason, source and confidence."""
    return {
        "host": name,
        "facts": dict(_facts(facts)),
        "cards": [{"index": gpu.index, "address": gpu.address, "name": gpu.name} for gpu in decision.cards],
        "cards_left_out": [gpu.address for gpu in decision.left_out],
        "settings": [_object(one, facts) for one in decision.settings],
        "pending_reboot": [one.key for one in reboot_pending(decision.settings, facts)],
        "unknown": dict(sorted(facts.unknown.items())),
    }


def _object(setting: Setting, facts: HostFacts) -> dict[str, Any]:
    return {
        "kind": setting.kind.value,
        "name": setting.name,
        "value": setting.value,
        "applied": setting.applied,
        "standing": standing(setting, facts).value,
        "reason": setting.reason,
        "source": setting.source,
        "confidence": setting.confidence.value,
        "expected_gain": setting.expected_gain or None,
        "engines": list(setting.engines),
        "replaces": setting.replaces,
    }


def explain_text(name: str, facts: HostFacts, decision: Decision) -> str:
    """The page for people."""
    lines = [f"{name}", "=" * len(name), ""]
    lines += [f"{title + ':':<18} {value}" for title, value in _facts(facts)]
    if decision.left_out:
        lines.append(f"{'left out:':<18} {', '.join(_card(gpu) for gpu in decision.left_out)}")
    lines += _pending(reboot_pending(decision.settings, facts))
    if not decision.settings:
        lines += ["", "No NVIDIA GPU: nothing is chosen, nothing is changed."]
    shown = [one for one in decision.settings if one.applied]
    for kind, members in groupby(sorted(shown, key=lambda one: list(Kind).index(one.kind)), key=lambda one: one.kind):
        lines += ["", TITLES[kind], "-" * len(TITLES[kind])]
        for setting in members:
            lines += _lines(setting, standing(setting, facts))
    rest = [one for one in decision.settings if not one.applied]
    if rest:
        lines += ["", "Known, and left alone", "---------------------"]
        for setting in rest:
            lines += _lines(setting, Standing.EXPLAINED)
    if facts.unknown:
        lines += ["", "Not known", "---------"]
        lines += [f"{key}: {why}" for key, why in sorted(facts.unknown.items())]
    return "\n".join(lines) + "\n"


def _lines(setting: Setting, stands: Standing) -> Iterator[str]:
    value = "unset" if setting.value is None else setting.value
    scope = "" if setting.engines == ENGINES else f" ({', '.join(setting.engines)})"
    state = f"[{setting.kind}]" if stands is Standing.EXPLAINED else f"[{stands}]"
    yield f"{setting.name} = {value}{scope}  {state}"
    if setting.replaces is not None:
        yield from _wrapped(f"OVERRIDE: the policy has {setting.replaces}")
    yield from _wrapped(setting.reason)
    if setting.expected_gain:
        yield from _wrapped(f"published: {setting.expected_gain}")
    yield from _wrapped(f"{setting.source} ({setting.confidence})")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _pending(settings: Iterable[Setting]) -> list[str]:
    keys = [one.key for one in settings]
    if not keys:
        return []
    return ["", "PENDING REBOOT (no serving unit starts before it):", *_wrapped(", ".join(keys))]


def _facts(facts: HostFacts) -> Iterator[tuple[str, str]]:
    cpu, driver = facts.cpu, facts.driver
    yield "system", f"{facts.os_id or '?'} {facts.os_version or '?'}, kernel {facts.kernel or '?'}"
    where = facts.virtualisation or "?"
    yield "machine", "bare metal" if facts.bare_metal else f"virtual: {where}, container: {facts.container or 'none'}"
    yield (
        "CPU",
        f"{cpu.sockets or '?'} x {cpu.name or '?'}, {cpu.threads or '?'} threads, {facts.numa_nodes or '?'} NUMA",
    )
    if facts.memory_bytes is not None:
        yield "memory", f"{facts.memory_bytes / 2**30:.0f} GiB{', with swap' if facts.swap else ''}"
    for name, count in Counter(_card_kind(gpu) for gpu in facts.gpus).items():
        yield "cards", f"{count} x {name}"
    if len(facts.gpus) > 1:
        yield "paths", ", ".join(f"{count} x {word}" for word, count in Counter(_pairs(facts)).items())
    if driver.version:
        modules = {True: "open modules", False: "proprietary modules", None: "modules of unknown kind"}[
            driver.open_module
        ]
        yield "driver", f"{driver.version}, {modules}"
    elif facts.gpus:
        yield "driver", "none is loaded"
    for home, version in facts.toolkits.items():
        yield "CUDA toolkit", f"{home}, {'.'.join(map(str, version)) if version else 'version unknown'}"
    if driver.smi_error:
        yield "nvidia-smi", driver.smi_error
    if facts.bridges:
        redirecting = sum(1 for bridge in facts.bridges.values() if bridge.redirects)
        yield "ACS redirect", f"on {redirecting} of {len(facts.bridges)} bridges above the cards"
    yield "IOMMU", f"{facts.iommu_groups} groups{', ' + '/'.join(facts.iommu_types) if facts.iommu_types else ''}"
    for path in facts.paths.values():
        disks = ", ".join(f"{disk.name} ({disk.scheduler})" for disk in path.disks) or path.source
        yield path.path, f"{path.filesystem} on {disks}, {path.free / 1e9:.0f} of {path.size / 1e9:.0f} GB free"


def _pairs(facts: HostFacts) -> Iterator[str]:
    for at, row in enumerate(facts.relations):
        yield from row[at + 1 :]


def _card_kind(gpu: Gpu) -> str:
    memory = f"{gpu.memory_mib} MiB" if gpu.memory_mib else "memory unknown"
    window = f"BAR1 {gpu.bar1_bytes / 2**30:g} GiB" if gpu.bar1_bytes else "BAR1 unknown"
    link = f"PCIe gen {gpu.link_gen_max or '?'} x{gpu.link_width_max or '?'}"
    return f"{gpu.name} ({memory}, {window}, {link})"


def _card(gpu: Gpu) -> str:
    return f"{gpu.address} {gpu.name}"
