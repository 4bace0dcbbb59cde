"""The whole policy over every kind of host: what must hold whatever the host is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rig.facts.host import HostFacts, parse_host
from rig.host.evidence import authors
from rig.host.explanation import explain_text
from rig.host.live_settings import reboot_pending
from rig.host.settings import Confidence, Kind
from rig.host.situation import Situation, Workload
from rig.host.system_files import GRUB_DROP_IN, MODPROBE, host_files
from rig.host.topology import OUTSIDE, Decision, decide
from rigctl.contract.comparison import key_values
from tests.unit import host_archetypes as hosts

MACHINES = ("metal", "vm", "container")
COUNTS = (1, 2, 4, 7, 8, 16)
LINKS = ("direct", "switch", "mixed")
UNKNOWN = "10de:2330"
CARDS = (hosts.SERVER, hosts.WORKSTATION, hosts.MAX_Q, UNKNOWN)
IOMMU = ("translated", "asked", "pt", "off")
"""asked: the command line has iommu=pt, and the groups translate."""
LIVE = (False, True)
CPUS = {
    "two turin": hosts.TURIN,
    "many": replace(hosts.TURIN, threads=384),
    "genoa": hosts.GENOA,
    "xeon": hosts.XEON,
    "core": hosts.CORE,
}
NCCL = ("2.27.5", "2.30.7")
KEYS = "EnableResizableBar=1;ForceP2P=0x11;GrdmaPciTopoCheckOverride=1;PowerMizerEnable=0x1"
OPERATORS = "/etc/modprobe.d/nvidia-p2p-override.conf"
EVERY = 37
"""Of the hosts that `make check` looks at one in so many; `make test` looks at all."""


@cache
def read(machine: str) -> dict[str, Any]:
    """What the facts say of a machine, from what its tools answer (systemd-detect-virt, the CPU's hypervisor bit)."""
    document = json.loads((ROOT / "rig/facts/turin-direct.json").read_text())
    answers = {"metal": ("none", "none"), "vm": ("kvm", "none"), "container": ("docker", "docker")}[machine]
    for command, answer in zip(("virtualisation", "container"), answers, strict=True):
        document["commands"][command] = {"rc": int(answer == "none"), "out": f"{answer}\n", "err": ""}
    document["cpu"]["hypervisor"] = machine == "vm"
    facts = parse_host(json.dumps(document))
    return {"virtualisation": facts.virtualisation, "container": facts.container}


@dataclass(frozen=True)
class Case:
    """One host and what one of its configurations brings."""

    machine: str
    count: int
    links: str
    card: str
    iommu: str
    live: bool
    cpu: str

    def facts(self) -> HostFacts:
        cpu = CPUS[self.cpu]
        numa = tuple(range(cpu.sockets or 1))
        known = hosts.SERVER if self.card == UNKNOWN else self.card
        direct, switched = hosts.direct(self.count, known, numa), hosts.switched(self.count, 2, known, numa)
        half = (self.count + 1) // 2
        mixed = [*switched[:half], *direct[half:]]
        cards = {"direct": direct, "switch": switched, "mixed": mixed}[self.links]
        facts = hosts.machine(cpu, cards)
        if self.card == UNKNOWN:
            unknown = (replace(c, pci_id=UNKNOWN, compute_capability=None, memory_mib=None) for c in cards)
            facts = replace(hosts.bare(replace(facts, gpus=tuple(unknown))), relations_guessed=True)
        token = {"asked": "iommu=pt", "pt": "iommu=pt", "off": "iommu=off"}.get(self.iommu)
        tokens = (token,) if token else ()
        types = {"pt": ("identity",), "off": ()}.get(self.iommu, ("DMA-FQ",))
        facts = replace(
            facts,
            command_line=(*(facts.command_line or ()), *tokens),
            iommu_groups=0 if self.iommu == "off" else 90,
            iommu_types=types,
            **read(self.machine),
        )
        if self.live:
            parameters = {**facts.driver.parameters, "RegistryDwords": KEYS}
            files = {**facts.boot_files, OPERATORS: f'options nvidia NVreg_RegistryDwords="{KEYS}"\n'}
            facts = replace(facts, driver=replace(facts.driver, parameters=parameters), boot_files=files)
        return facts


CASES = [
    Case(*parts) for parts in itertools.product(MACHINES, COUNTS, LINKS, CARDS, IOMMU, LIVE, CPUS)
]  # fmt: skip


def workloads(case: Case) -> Iterator[Workload]:
    """All cards, two of them, one: with an NCCL of each release."""
    for count in sorted({1, min(2, case.count), case.count}):
        for nccl in NCCL:
            yield Workload(tuple(range(count)), count, nccl)


def rebooted(facts: HostFacts, decision: Decision) -> HostFacts:
    """The host after a deploy and a reboot: arguments, and options of whichever file wins."""
    chosen = decision.host
    ours = {one.path: one.text for one in host_files(chosen, facts) if one.path in (MODPROBE, GRUB_DROP_IN)}
    files = {**facts.boot_files, **ours}
    tokens = tuple(dict.fromkeys((*(facts.command_line or ()), *chosen.kernel_arguments)))
    off = any(token.endswith("iommu=off") for token in tokens)
    types = () if off else ("identity",) if "iommu=pt" in chosen.kernel_arguments else facts.iommu_types
    after = replace(
        facts, boot_files=files, command_line=tokens,
        iommu_groups=0 if off else facts.iommu_groups, iommu_types=types,
    )  # fmt: skip
    seen = Situation(after, {}, after.gpus)
    names = {"RegistryDwords": "NVreg_RegistryDwords", "DynamicPowerManagement": "NVreg_DynamicPowerManagement"}
    found = {name: options[-1][1] for name, option in names.items() if (options := seen.options("nvidia", option))}
    hmm = seen.options("nvidia_uvm", "uvm_disable_hmm")
    driver = replace(
        after.driver, version=after.driver.version or "595.58.03", parameters={**after.driver.parameters, **found},
        hmm_disabled=bool(hmm) and hmm[-1][1] == "1",
    )  # fmt: skip
    return replace(after, driver=driver)


def look(case: Case) -> int:
    """Raises AssertionError where a property does not hold; says how many decisions were looked at."""
    facts, looked = case.facts(), 0
    for workload in workloads(case):
        decision = decide(facts, None, workload)
        satisfiable(case, facts, decision)
        nothing_taken_away(case, facts, decision)
        no_contradiction(workload, decision)
        no_harm(case, workload, decision)
        founded(decision)
        if case.card == UNKNOWN:
            left_alone(decision)
        looked += 1
    explain_text("host", facts, decide(facts))
    host_files(decide(facts).host, facts)
    return looked


def satisfiable(case: Case, facts: HostFacts, decision: Decision) -> None:
    applied = [one for one in decision.settings if one.applied]
    if case.machine == "container":
        assert not [one.key for one in applied if one.kind in OUTSIDE]
    if case.machine == "vm":
        assert not [one.key for one in applied if one.kind in (Kind.KERNEL_ARGUMENT, Kind.GOVERNOR)]
    after = rebooted(facts, decision)
    again = decide(after, None, decision.workload)
    if case.card != UNKNOWN:
        assert not [one.key for one in reboot_pending(again.settings, after)]
        assert again.host == decision.host, "another decision after the reboot"


def nothing_taken_away(case: Case, facts: HostFacts, decision: Decision) -> None:
    after = rebooted(facts, decision)
    if case.live:
        wanted = key_values(KEYS)
        assert wanted.items() <= key_values(after.driver.parameters["RegistryDwords"]).items()
        assert "NVreg_RegistryDwords" not in decision.host.module_options.get("nvidia", {})
    if case.iommu in ("pt", "asked"):
        assert not [token for token in decision.host.kernel_arguments if "iommu" in token]
    if case.iommu == "off":
        assert set(decision.host.kernel_arguments) <= {
            "iommu=off",
            "intel_iommu=off",
            "pcie_aspm=off",
            "pcie_port_pm=off",
        }


def no_contradiction(workload: Workload, decision: Decision) -> None:
    for engine in ("vllm", "sglang"):
        variables = decision.host.environment[engine]
        flags = decision.host.engine_flags.get(engine, {})
        nccl = {name for name in variables if name.startswith("NCCL_")}
        if "NCCL_P2P_DISABLE" in nccl:
            assert not {"NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_ALGO"} & nccl
            assert flags["disable-custom-all-reduce"] == "true"
        if workload.ranks == 1:
            assert not nccl and not flags
        if "NCCL_PROTO" in nccl:
            assert workload.nccl == "2.27.5"
        if (workload.ranks or 0) < 8:
            assert not decision.host.memory_fraction
    arguments = decision.host.kernel_arguments
    assert len({token.partition("=")[0] for token in arguments}) == len(arguments)
    assert len({one.key for one in decision.settings}) == len(decision.settings)


def no_harm(case: Case, workload: Workload, decision: Decision) -> None:
    """No CPUs are lost, and no P2P is used under an IOMMU that translates."""
    if case.cpu == "many" and case.iommu != "off":
        assert not [token for token in decision.host.kernel_arguments if token.endswith("iommu=off")]
    if case.machine == "metal" and case.iommu == "asked" and case.card != UNKNOWN and (workload.ranks or 0) > 1:
        assert decision.host.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
        assert "NVreg_RegistryDwords" not in decision.host.module_options.get("nvidia", {})


def founded(decision: Decision) -> None:
    for one in decision.settings:
        assert one.value != "" and one.reason, one.key
        if one.applied:
            assert one.confidence is not Confidence.SINGLE, one.key
            assert authors(one.supports) > 1 or any(report.vendor for report in one.supports), one.key


def left_alone(decision: Decision) -> None:
    assert decision.host.kernel_arguments == ()
    assert decision.host.module_options == {}
    assert not [name for name in decision.host.environment["vllm"] if name.startswith("NCCL_")]
    assert (decision.host.engine_flags, decision.host.attention, decision.host.memory_fraction) == ({}, {}, {})


def look_at(cases: list[Case]) -> int:
    looked = 0
    for case in cases:
        try:
            looked += look(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return looked


def test_some_hosts_of_every_kind() -> None:
    some = CASES[::EVERY]
    for name in ("machine", "count", "links", "card", "iommu", "live", "cpu"):
        assert {getattr(case, name) for case in some} == {getattr(case, name) for case in CASES}
    assert look_at(some) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_all_hosts(machine: str) -> None:
    looked = look_at([case for case in CASES if case.machine == machine])
    print(f"{machine}: {looked} decisions")
    assert looked > 5000
