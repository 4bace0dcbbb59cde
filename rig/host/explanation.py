"""The page an operator pins to the wall: what the host is, what was chosen for it, why, from where. Pure."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rig.facts.host import Gpu, HostFacts
from rig.host.evidence import authors
from rig.host.live_settings import Standing, reboot_needed, reboot_recommended, standing
from rig.host.settings import ENGINES, Kind, Setting
from rig.host.topology import Decision

WIDTH = 110
SHORT = 190
STANCE = {"supports", "against"}
OF_ENGINES = (Kind.ENVIRONMENT, Kind.ENGINE_FLAG, Kind.ATTENTION, Kind.MEMORY_FRACTION)
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


def explain_json(
    name: str, facts: HostFacts, decision: Decision, configurations: Mapping[str, Decision] | None = None
) -> dict[str, Any]:
    """The page as one JSON value; each setting an object with value, reason, evidence and confidence."""
    return {
        "host": name,
        "facts": dict(_facts(facts)),
        "cards": [{"index": gpu.index, "address": gpu.address, "name": gpu.name} for gpu in decision.cards],
        "cards_left_out": [gpu.address for gpu in decision.left_out],
        "settings": [_object(one, facts) for one in decision.settings],
        "configurations": {
            name: {"workload": asdict(one.workload), "settings": _applied(one)}
            for name, one in (configurations or {}).items()
        },
        "pending_reboot": [one.key for one in reboot_needed(decision.settings, facts)],
        "recommended_at_reboot": [one.key for one in reboot_recommended(decision.settings, facts)],
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
        "for": [one.model_dump(mode="json", exclude=STANCE) for one in setting.supports],
        "against": [one.model_dump(mode="json", exclude=STANCE) for one in setting.against],
    }


def explain_text(
    name: str,
    facts: HostFacts,
    decision: Decision,
    configurations: Mapping[str, Decision] | None = None,
    *,
    everything: bool = False,
) -> str:
    """The page for people. everything: whole reasons, every report, and what is known and left alone."""
    lines = [f"{name}", "=" * len(name), ""]
    lines += [f"{title + ':':<18} {value}" for title, value in _facts(facts)]
    if decision.left_out:
        lines.append(f"{'left out:':<18} {', '.join(_card(gpu) for gpu in decision.left_out)}")
    for title, found in (
        ("PENDING REBOOT (no serving unit starts before it):", reboot_needed(decision.settings, facts)),
        ("Recommended at the next reboot (nothing waits for it):", reboot_recommended(decision.settings, facts)),
    ):
        if found:
            lines += ["", title, *_wrapped(", ".join(one.key for one in found))]
    if not decision.settings:
        lines += ["", "No NVIDIA GPU: nothing is chosen, nothing is changed."]
    lines.append("")
    shown = [one for one in decision.settings if one.applied]
    for kind, members in groupby(sorted(shown, key=lambda one: list(Kind).index(one.kind)), key=lambda one: one.kind):
        lines += _title(TITLES[kind])
        lines += _settings(members, facts, everything)
    lines += _by_configuration(decision, configurations or {})
    rest = [one for one in decision.settings if not one.applied]
    grounds = [
        one
        for one in rest
        if everything or one.kept or one.blocked or one.replaces or one.against or (one.outside and one.founded)
    ]
    if grounds:
        lines += _title("Known, and left alone")
        lines += _settings(grounds, facts, everything)
    if others := [one for one in rest if one not in grounds]:
        names = ", ".join(f"{one.name}={'unset' if one.value is None else one.value}" for one in others)
        lines += ["", *_wrapped(f"Left alone too, for a single report or none (--all says why): {names}")]
    if facts.unknown:
        lines += _title("Not known")
        lines += [f"{key}: {why}" for key, why in sorted(facts.unknown.items())]
    return "\n".join(lines) + "\n"


def _title(text: str) -> list[str]:
    return [f"--- {text}"]


def _settings(settings: Iterable[Setting], facts: HostFacts, everything: bool) -> Iterator[str]:
    """Settings of one rule that stand alike are shown together."""
    groups: dict[object, list[Setting]] = {}
    for one in settings:
        alike = (one.reason, one.supports, one.against, one.replaces, one.engines, standing(one, facts))
        groups.setdefault(one.key if everything else tuple(map(str, alike)), []).append(one)
    for members in groups.values():
        names = ", ".join(f"{one.name} = {'unset' if one.value is None else one.value}" for one in members)
        yield from _lines(names, members[0], standing(members[0], facts), everything)


def _lines(names: str, setting: Setting, stands: Standing, everything: bool) -> Iterator[str]:
    scope = "" if setting.engines == ENGINES else f" ({', '.join(setting.engines)})"
    state = f"[{setting.kind}]" if stands is Standing.EXPLAINED else f"[{stands}]"
    weight = f"  {authors(setting.supports)} for, {authors(setting.against)} against" if setting.supports else ""
    yield from textwrap.wrap(f"{names}{scope}  {state}{weight}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if setting.replaces is not None:
        yield from _wrapped(f"OVERRIDE: the policy has {setting.replaces}")
    short = textwrap.shorten(setting.reason, SHORT, placeholder=" ...")
    yield from _wrapped(setting.reason if everything or setting.blocked else short)
    if everything:
        if setting.expected_gain:
            yield from _wrapped(f"published: {setting.expected_gain}")
        for stance, reports in (("for", setting.supports), ("against", setting.against)):
            for report in reports:
                yield from _wrapped(f"{stance}: {report}")
        yield from _wrapped(f"{setting.source if not setting.supports else setting.confidence}")
    elif setting.against and stands is not Standing.EXPLAINED:
        for stance, reports in (("for", setting.supports[:1]), ("against", setting.against[:1])):
            for report in reports:
                yield f"    {stance}: {textwrap.shorten(report.brief, WIDTH - 16, placeholder=' ...')}"


def _applied(decision: Decision) -> dict[str, str | None]:
    return {one.key: one.value for one in decision.settings if one.applied and one.kind in OF_ENGINES}


def _by_configuration(decision: Decision, configurations: Mapping[str, Decision]) -> Iterator[str]:
    """Where configurations get other settings than all cards with an unknown NCCL would, and which."""
    usual, groups = _applied(decision), dict[tuple[str, str], list[str]]()
    for name, one in configurations.items():
        mine, work = _applied(one), one.workload
        differs = [f"{key} = {value or 'unset'}" for key, value in mine.items() if usual.get(key) != value]
        differs += [f"without {key}" for key in usual if key not in mine]
        brings = f"NCCL {work.nccl or 'none'}, {work.ranks or 'no'} ranks"
        if differs:
            groups.setdefault((brings, "; ".join(differs)), []).append(name)
    if groups:
        yield from _title("Other settings of single configurations")
    for (brings, differs_text), names in groups.items():
        yield from textwrap.wrap(f"{', '.join(names)} ({brings}):", WIDTH, subsequent_indent="  ")
        yield from _wrapped(differs_text)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


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
