"""What the rules of the policy ask of a host: its facts, the cards in question, and what was decided before. Pure."""

import re
from collections import Counter
from collections.abc import Container, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from rig.facts.host import Gpu, HostFacts
from rig.host.settings import TIME_UNIT, Kind, Setting
from rig.host.system_files import GRUB_DROP_IN, MODPROBE
from rigctl.contract.comparison import key_values, version_tuple

IOMMU_ARGUMENTS = ("iommu", "amd_iommu", "intel_iommu", "iommu.passthrough")
SWITCH_MAKERS = {"11f8": "microchip", "1f18": "microchip", "1000": "broadcom"}


NEARNESS = {
    **dict.fromkeys(("LOC", "NVL", "NVB", "C2C", "0"), -1),
    **{"PIX": 1, "1": 1, "PXB": 2, "2": 2, "PHB": 3, "NODE": 3, "3": 3, "SYS": 4},
}
"""NCCL_P2P_LEVEL in both notations, and nvidia-smi's words for a pair (NCCL src/graph/paths.cc; it has no NODE)."""


class Machine(StrEnum):
    """Where the system runs. What belongs to the host outside cannot be set from a container."""

    METAL = "bare metal"
    VM = "virtual machine"
    CONTAINER = "container"


class Links(StrEnum):
    """How the cards hang on the CPU."""

    DIRECT = "direct"
    SWITCHED = "behind switches"
    MIXED = "direct and behind switches"


class Iommu(StrEnum):
    """What an IOMMU does with the traffic of cards."""

    OFF = "off"
    PASSTHROUGH = "passed through"
    TRANSLATING = "translating"


class P2P(StrEnum):
    """Whether cards may write to each other's memory, or what stands against it."""

    NONE = "no several cards over PCIe alone"
    USABLE = "usable"
    REFUSED = "refused by the driver"
    DESKTOP = "broken on this CPU"
    TRANSLATED = "hangs under the IOMMU"
    LEFT = "switched off by the operator"


@dataclass(frozen=True)
class Workload:
    """What one configuration brings. Unset: all cards of the host, a rank each, an NCCL that is not known."""

    gpus: tuple[int, ...] | None = None
    ranks: int | None = None
    nccl: str | None = None
    """Version in the release's lock."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the catalogue itself gives to its engine."""


@dataclass(frozen=True)
class Versions:
    """A range of versions, for `in`. One that is not known is in none."""

    since: str = "0"
    below: str | None = None

    def __contains__(self, version: object) -> bool:
        found = version_tuple(version if isinstance(version, str) else None)
        inside = version_tuple(self.since) <= found and (self.below is None or found < version_tuple(self.below))
        return bool(found) and inside


@dataclass(frozen=True)
class Other:
    """All that is not in there, for `in`; what is not known too."""

    than: Container[Any]

    def __contains__(self, value: object) -> bool:
        return value not in self.than


@dataclass
class Situation:
    """Facts, cards and outcome so far. decided: the settings of earlier stages by key, overrides included."""

    facts: HostFacts
    overrides: Mapping[str, str | None]
    cards: tuple[Gpu, ...]
    ranks: int = 0
    nccl: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    decided: MutableMapping[str, Setting] = field(default_factory=dict)

    # --- The machine

    @property
    def container(self) -> bool:
        return self.facts.container not in (None, "none")

    @property
    def outer(self) -> Machine:
        """The machine, or the one outside this container."""
        return Machine.METAL if self.facts.virtualisation in (None, "none") else Machine.VM

    @property
    def vendor(self) -> str | None:
        return self.facts.cpu.vendor

    @property
    def sockets(self) -> int:
        return self.facts.cpu.sockets or 1

    @property
    def generation(self) -> str | None:
        """Of an EPYC: "turin" or "genoa" (family 25, models 10h to 1Fh; Linux arch/x86/kernel/cpu/amd.c, Zen 4)."""
        cpu = self.facts.cpu
        genoa = cpu.amd and cpu.family == 25 and cpu.model in range(0x10, 0x20) and "EPYC" in (cpu.name or "")
        return "turin" if cpu.turin else "genoa" if genoa else None

    @property
    def desktop(self) -> bool:
        return self.facts.cpu.intel and bool(re.search(r"\bCore\b", self.facts.cpu.name or ""))

    @property
    def numa_nodes(self) -> int:
        return self.facts.numa_nodes or 1

    @property
    def clock_lost(self) -> bool:
        """Nobody sets the clock, and the host has the daemon for it."""
        return self.facts.clock_synchronised is False and TIME_UNIT in self.facts.units

    @property
    def governed(self) -> bool:
        return bool(self.facts.cpu.governors)

    @property
    def driver(self) -> str | None:
        """Version that the next boot loads: module options take effect with it."""
        return self.facts.driver.on_disk or self.facts.driver.version

    # --- The cards

    @cached_property
    def pairs(self) -> frozenset[str]:
        """Kinds of path between the cards."""
        return frozenset(self._between(self.facts.relations))

    def _between(self, rows: tuple[tuple[str, ...], ...]) -> set[str]:
        chosen = [card.index for card in self.cards]
        return {rows[a][b] for a in chosen for b in chosen if a != b and len(rows) > max(a, b)}

    @property
    def sm120(self) -> bool:
        return bool(self.cards) and self.cards[0].compute_capability == (12, 0)

    @property
    def rtx_pro(self) -> bool:
        """Cards of the kind that the reports are of."""
        model = self.cards[0].model if self.cards else None
        return model is not None and model.links == "pcie"

    @property
    def peers(self) -> bool:
        """Several cards that reach each other over PCIe alone. Of an unknown card the driver must say so."""
        if len(self.cards) < 2:
            return False
        model = self.cards[0].model
        if any(pair.startswith("NV") for pair in self.pairs):
            return False
        if model is not None:
            return model.links == "pcie"
        return self.cards[0].answers is True and not self.facts.relations_guessed

    @cached_property
    def links(self) -> Links:
        """In a virtual machine it is what the guest is shown."""
        rows = self.facts.relations
        found = set()
        for card in self.cards:
            row = rows[card.index] if card.index < len(rows) else ()
            found.add(card.behind_switch or bool({"PIX", "PXB"} & set(row)))
        return Links.MIXED if len(found) > 1 else Links.SWITCHED if True in found else Links.DIRECT

    @property
    def cards_a_switch(self) -> int:
        """Most cards below one port of the CPU."""
        return max(Counter(card.bridges[0] for card in self.cards if card.behind_switch).values(), default=0)

    @property
    def switches(self) -> int:
        """Ports of the CPU with a switch and cards below."""
        return len({card.bridges[0] for card in self.cards if card.behind_switch})

    @property
    def switch_maker(self) -> str | None:
        """Microchip has vendor 11f8 (c-payne's boards 1f18), Broadcom's PEX890xx 1000. None: another, or several."""
        bridges = (self.facts.bridges.get(address) for card in self.cards for address in card.bridges[1:])
        found = {SWITCH_MAKERS.get(one.pci_id.partition(":")[0]) for one in bridges if one is not None}
        return found.pop() if len(found) == 1 else None

    @property
    def crosses_numa(self) -> bool:
        """Cards on several NUMA nodes; where the nodes are not known, several sockets count."""
        if "SYS" in self.pairs:
            return True
        known = {card.numa_node for card in self.cards}
        return len(known - {None}) > 1 or (None in known and self.sockets > 1)

    @property
    def nvme(self) -> bool:
        return any(disk.name.startswith("nvme") for path in self.facts.paths.values() for disk in path.disks)

    # --- The IOMMU

    def live(self, token: str) -> bool:
        return token in (self.facts.command_line or ())

    def variable(self, name: str) -> str | None:
        """An environment variable that the catalogue or the operator gives to the engine."""
        return self.environment.get(name, self.overrides.get(f"{Kind.ENVIRONMENT}.{name}"))

    @property
    def taken(self) -> tuple[Gpu, ...]:
        """Cards of the host that a guest has, or is to get."""
        return tuple(gpu for gpu in self.facts.gpus if gpu.taken)

    @property
    def passing_asked(self) -> bool:
        """The kernel's command line asks for an IOMMU that passes through."""
        modes = [one.partition("=")[2].split(",") for one in self.facts.command_line or () if one.startswith("iommu=")]
        return (bool(modes) and "pt" in modes[-1]) or any(self.live(f"iommu.passthrough={on}") for on in ("1", "on"))

    @property
    def iommu(self) -> Iommu | None:
        """As the running kernel has it, whatever its command line asks for; None where the host does not say."""
        kinds = set(self.facts.iommu_types)
        if self.facts.iommu_groups == 0:
            return Iommu.OFF
        if kinds and "identity" not in kinds:
            return Iommu.TRANSLATING
        if self.passing_asked or kinds == {"identity"}:
            return Iommu.PASSTHROUGH
        if self.facts.iommu_groups is None:
            off = any(self.live(f"{name}=off") for name in ("iommu", "amd_iommu", "intel_iommu"))
            return Iommu.OFF if off else None
        return Iommu.TRANSLATING

    @property
    def iommu_asked(self) -> Iommu | None:
        """What the operator's overrides make of it; None where they leave it to the policy."""
        asked = {
            name: self.overrides[key]
            for name in IOMMU_ARGUMENTS
            if (key := f"kernel_argument.{name}") in self.overrides
        }
        if "off" in asked.values():
            return Iommu.OFF
        if asked.get("iommu") == "pt" or asked.get("iommu.passthrough") in ("1", "on"):
            return Iommu.PASSTHROUGH
        if any(value is not None for value in asked.values()):
            return Iommu.TRANSLATING
        left = "iommu" in asked or "intel_iommu" in asked
        return (self.iommu or Iommu.TRANSLATING) if left else None

    @property
    def iommu_after(self) -> Iommu | None:
        """Once the settings that were decided are live; in a container what is."""
        if self.container:
            return self.iommu
        wanted = {name: value for name in IOMMU_ARGUMENTS if (value := self.overrides.get(f"kernel_argument.{name}"))}
        ours = {name: self.decided.get(f"kernel_argument.{name}") for name in IOMMU_ARGUMENTS}
        wanted |= {name: one.value for name, one in ours.items() if one is not None and one.applied and one.value}
        if all(self.live(f"{name}={value}") for name, value in wanted.items()):
            return self.iommu or self.iommu_asked
        if self.iommu_asked is not None:
            return self.iommu_asked
        return Iommu.OFF if "off" in wanted.values() else Iommu.PASSTHROUGH

    @property
    def off_loses_cpus(self) -> bool:
        """With the IOMMU off not all CPUs would come up: more than 256 need x2APIC (256 are published to run so)."""
        return (self.facts.cpu.threads or 0) > 256 and self.iommu is not Iommu.OFF

    def written(self, token: str) -> bool:
        """An earlier deploy put the kernel argument there."""
        drop_in = self.facts.boot_files.get(GRUB_DROP_IN, "").replace('"', " ")
        return token in (*self.facts.our_arguments, *drop_in.split())

    # --- Peer-to-peer

    @property
    def p2p_refused(self) -> str | None:
        """The driver's word for a pair of the cards that may not use P2P; None when all may, or nothing is known."""
        return next(iter(sorted(self._between(self.facts.p2p or ()) - {"OK"})), None)

    @property
    def p2p_never(self) -> bool:
        """No setting of the host brings P2P between any two of the cards."""
        answers = self._between(self.facts.p2p or ()) - {"X"}
        return self.desktop or (bool(answers) and "OK" not in answers)

    @property
    def p2p_left(self) -> bool:
        """The operator or the catalogue has NCCL do without P2P (NCCL user guide, NCCL_P2P_DISABLE, NCCL_P2P_LEVEL)."""
        disable, level = (self.variable(f"NCCL_P2P_{name}") or "" for name in ("DISABLE", "LEVEL"))
        nearest = min((NEARNESS[pair] for pair in self.pairs if pair in NEARNESS), default=0)
        return bool(re.fullmatch(r"(0[xX])?0*1", disable.strip())) or NEARNESS.get(level, nearest) < nearest

    @property
    def p2p(self) -> P2P:
        """As it will be once the settings that were decided are live."""
        if not self.peers:
            return P2P.NONE
        if self.p2p_refused is not None:
            return P2P.REFUSED
        if self.desktop:
            return P2P.DESKTOP
        if self.outer is Machine.METAL and self.iommu_after is Iommu.TRANSLATING:
            return P2P.TRANSLATED
        return P2P.LEFT if self.p2p_left else P2P.USABLE

    # --- Options of the driver's modules

    def options(self, module: str, option: str) -> list[tuple[str, str]]:
        return configured(self.facts, module, option)

    @property
    def dwords(self) -> dict[str, str]:
        """The driver's RegistryDwords: live, or as it would take them were it loaded."""
        return key_values(self.dwords_text)

    @cached_property
    def dwords_file(self) -> tuple[str | None, str]:
        """The file whose RegistryDwords win, and what it has them be from the next load on."""
        files = self.options("nvidia", "NVreg_RegistryDwords")
        return files[-1] if files else (None, "")

    @property
    def dwords_text(self) -> str:
        staged = self.dwords_file[1] if self.facts.driver.version is None else ""
        text = self.facts.driver.parameters.get("RegistryDwords", staged)
        return ";".join(part.strip() for part in text.split(";") if part.strip())

    @property
    def forced(self) -> bool:
        """ForceP2P is live, or is once the driver is loaded."""
        value = self.dwords.get("ForceP2P", "")
        return bool(re.fullmatch(r"0[xX][0-9a-fA-F]+|[0-9]+", value)) and bool(re.sub("^0[xX]", "", value).strip("0"))

    @property
    def dwords_ours(self) -> bool:
        return self.dwords_file[0] == MODPROBE


def configured(facts: HostFacts, module: str, option: str) -> list[tuple[str, str]]:
    """(file, value) wherever an option of a module is set, the one that wins last: modprobe reads in name order."""
    found = []
    line = re.compile(rf"^\s*options\s+{module.replace('_', '[-_]')}\s(.*)$", re.M)
    files = {path: text for path, text in facts.boot_files.items() if "/modprobe.d/" in path}
    for path in sorted(files, key=lambda one: one.rpartition("/")[2]):
        for words in line.findall(files[path]):
            values = re.findall(rf'(?<![\w.]){re.escape(option)}=("[^"]*"|\S+)', words)
            found += [(path, value.strip("\"'")) for value in values]
    for token in facts.command_line or ():
        name, _, value = token.replace('"', "").partition("=")
        if name.replace("-", "_") == f"{module}.{option}":
            found.append(("the kernel's command line", value))
    return found
