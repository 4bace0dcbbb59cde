"""The topology policy on hosts as they are found."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rig.facts.host import Driver, HostFacts, Unit
from rig.host.evidence import authors
from rig.host.live_settings import Standing, reboot_needed, reboot_pending, standing
from rig.host.rules import FORCE_P2P
from rig.host.settings import ACS_UNIT, PERSISTENCE_UNIT, TIME_UNIT, Confidence, HostSettings, Kind
from rig.host.situation import Iommu, Situation, Workload
from rig.host.system_files import MODPROBE, host_files
from rig.host.topology import Decision, TopologyError, decide
from tests.unit import host_archetypes as hosts
from tests.unit.host_archetypes import machine


def settings(facts: HostFacts) -> HostSettings:
    return decide(facts).host


def applied(decision: Decision, key: str) -> bool:
    setting = decision.find(key)
    return setting is not None and setting.applied


def test_two_turin_with_cards_on_the_cpus() -> None:
    chosen = decide(hosts.TURIN_DIRECT, None, Workload(nccl="2.27.5")).host
    assert chosen.kernel_arguments == ("iommu=off", "amd_iommu=off", "pcie_aspm=off", "pcie_port_pm=off")
    assert chosen.module_options == {
        "nvidia_uvm": {"uvm_disable_hmm": "1"},
        "nvidia": {"NVreg_DynamicPowerManagement": "0x00", "NVreg_RegistryDwords": FORCE_P2P},
    }
    assert chosen.boot_units == (PERSISTENCE_UNIT, ACS_UNIT)
    assert chosen.environment["vllm"] == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MIN_NCHANNELS": "8",
        "NCCL_PROTO": "LL",
    }
    assert chosen.environment["sglang"]["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
    assert "NCCL_GRAPH_FILE" not in chosen.environment["vllm"]
    assert chosen.engine_flags == {engine: {"disable-custom-all-reduce": "true"} for engine in ("vllm", "sglang")}
    assert chosen.memory_fraction["vllm.base"] == 0.94
    assert chosen.memory_fraction["vllm.eagle3-dcp8"] == 0.88
    assert chosen.attention == {"vllm": "TRITON_MLA", "sglang": "triton"}
    assert chosen.sysctls == {"kernel.numa_balancing": "0"}
    assert (chosen.governor, chosen.disk_scheduler, chosen.power_limit_w) == ("performance", {"nvme": "none"}, None)
    assert chosen.gpus == tuple(range(8))


def test_a_clock_that_nobody_sets_gets_the_daemon_that_is_there() -> None:
    there = {TIME_UNIT: Unit(active=False, enabled=False)}
    lost = replace(hosts.TURIN_DIRECT, clock_synchronised=False)
    assert TIME_UNIT in settings(replace(lost, units=there)).boot_units
    assert TIME_UNIT not in settings(lost).boot_units
    assert TIME_UNIT not in settings(replace(lost, units=there, container="docker")).boot_units
    assert TIME_UNIT not in settings(replace(hosts.TURIN_DIRECT, units=there, clock_synchronised=True)).boot_units


def test_turin_behind_switches_needs_neither_force_nor_protocol() -> None:
    chosen = settings(hosts.ESC8000A)
    assert "NVreg_RegistryDwords" not in chosen.module_options["nvidia"]
    assert "NCCL_PROTO" not in chosen.environment["vllm"]
    assert chosen.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"
    assert ACS_UNIT in chosen.boot_units


def test_one_genoa_with_switches_stays_within_its_numa_node() -> None:
    chosen = settings(hosts.GENOA_SWITCHED)
    assert chosen.environment["vllm"]["NCCL_P2P_LEVEL"] == "PHB"
    assert "NCCL_PROTO" not in chosen.environment["vllm"]
    assert "kernel.numa_balancing" not in chosen.sysctls
    assert chosen.kernel_arguments[:2] == ("iommu=off", "amd_iommu=off")


def test_intel_gets_intels_argument() -> None:
    chosen = settings(hosts.XEON_DIRECT)
    assert chosen.kernel_arguments == ("intel_iommu=off", "pcie_aspm=off", "pcie_port_pm=off")
    assert "NCCL_PROTO" not in chosen.environment["vllm"]
    assert chosen.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"


def test_workstation_with_four_cards() -> None:
    chosen = settings(hosts.WORKSTATION_4)
    assert chosen.module_options["nvidia"]["NVreg_RegistryDwords"] == FORCE_P2P
    assert chosen.environment["vllm"]["NCCL_P2P_LEVEL"] == "PHB"
    assert chosen.memory_fraction == {}
    assert chosen.gpus == (0, 1, 2, 3)


def test_eight_max_q_are_sm120_too() -> None:
    decision = decide(hosts.MAX_Q_8)
    assert decision.host.attention["vllm"] == "TRITON_MLA"
    power = decision.find("power_limit.watts")
    assert power is not None
    assert not power.applied
    assert "250 to 325 W" in power.reason


def test_intel_desktop_does_without_p2p() -> None:
    chosen = settings(hosts.CORE_ULTRA_2)
    assert chosen.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_LEVEL" not in chosen.environment["vllm"]
    # At two ranks the custom all-reduce is on unless it is switched off, and hangs where P2P does not work.
    assert chosen.engine_flags == {engine: {"disable-custom-all-reduce": "true"} for engine in ("vllm", "sglang")}


def test_a_virtual_machine_is_not_given_what_only_its_host_can_do() -> None:
    chosen = settings(hosts.VIRTUAL)
    assert chosen.kernel_arguments == ()
    assert chosen.module_options == {"nvidia_uvm": {"uvm_disable_hmm": "1"}}
    assert chosen.boot_units == (PERSISTENCE_UNIT,)
    assert chosen.governor is None
    assert "NCCL_P2P_LEVEL" not in chosen.environment["vllm"]


def test_a_container_changes_nothing_of_its_host() -> None:
    chosen = settings(replace(hosts.H200_1, container="docker"))
    assert (chosen.boot_units, chosen.sysctls, chosen.disk_scheduler, chosen.governor) == ((), {}, {}, None)
    assert chosen.environment["vllm"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_of_mixed_cards_the_larger_set_serves() -> None:
    decision = decide(hosts.MIXED)
    assert decision.host.gpus == (0, 1, 2, 3)
    assert [card.index for card in decision.left_out] == [4, 5]
    assert decision.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "PHB"


def test_nvlink_hosts_get_nothing_that_is_for_pcie() -> None:
    for facts in (hosts.H200_1, hosts.H200_8):
        chosen = settings(facts)
        assert chosen.kernel_arguments == ()
        assert chosen.module_options == {}
        assert chosen.attention == {}
        assert not any(name.startswith("NCCL_") for name in chosen.environment["vllm"])
        assert chosen.device_allow


def test_a_host_without_gpus_is_left_alone() -> None:
    assert decide(hosts.NO_GPU).settings == ()
    assert settings(hosts.NO_GPU) == HostSettings()


@pytest.mark.parametrize("name", sorted(hosts.ALL))
def test_every_setting_is_explained_and_single_reports_are_not_applied(name: str) -> None:
    decision = decide(hosts.ALL[name])
    keys = [(one.key, one.engines, one.value) for one in decision.settings]
    assert len(keys) == len(set(keys))
    for one in decision.settings:
        assert len(one.reason) > 15, one.key
        assert "/" in one.source or "NVIDIA" in one.source, one.key
        assert not (one.applied and one.confidence is Confidence.SINGLE), one.key
        assert one.value != "", one.key


@pytest.mark.parametrize("name", sorted(hosts.ALL))
def test_what_is_applied_rests_on_more_than_one_author(name: str) -> None:
    for one in decide(hosts.ALL[name]).settings:
        if one.applied:
            assert authors(one.supports) > 1 or any(report.vendor for report in one.supports), one.key
            assert any(report.vendor for report in one.supports) or authors(one.supports) > authors(one.against), (
                one.key
            )


def test_a_single_report_is_an_override_away() -> None:
    decision = decide(hosts.TURIN_DIRECT)
    for key in ("sysctl.vm.swappiness", "environment.OMP_NUM_THREADS", "environment.SAFETENSORS_FAST_GPU"):
        assert not applied(decision, key), key
    overrides: dict[str, str | None] = {"sysctl.vm.swappiness": "0", "environment.OMP_NUM_THREADS": "8"}
    chosen = decide(hosts.TURIN_DIRECT, overrides).host
    assert chosen.sysctls["vm.swappiness"] == "0"
    assert chosen.environment["vllm"]["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize("name", sorted(hosts.ALL))
def test_the_first_deploy_decides_as_the_second_would(name: str) -> None:
    facts = hosts.ALL[name]
    assert decide(hosts.bare(facts)).host == decide(facts).host


def test_deciding_again_after_the_reboot_changes_nothing() -> None:
    before = decide(hosts.TURIN_DIRECT).host
    tokens = (*(hosts.TURIN_DIRECT.command_line or ()), *before.kernel_arguments)
    live = replace(hosts.TURIN_DIRECT, command_line=tokens, iommu_groups=0, iommu_types=())
    assert decide(live).host == before


def test_an_iommu_that_passes_through_or_is_absent_is_kept() -> None:
    passing = replace(hosts.TURIN_DIRECT, command_line=("ro", "iommu=pt"), iommu_types=("identity",))
    decision = decide(passing)
    assert not applied(decision, "kernel_argument.iommu")
    assert "kept as it is" in getattr(decision.find("kernel_argument.iommu"), "reason", "")
    none = decide(replace(hosts.TURIN_DIRECT, iommu_groups=0))
    assert not applied(none, "kernel_argument.amd_iommu")


def test_p2p_that_the_driver_refuses_is_not_asked_of_nccl() -> None:
    rows = [list(row) for row in hosts.TURIN_DIRECT.p2p or ()]
    rows[2][6] = "CNS"
    chosen = settings(replace(hosts.TURIN_DIRECT, p2p=tuple(map(tuple, rows))))
    assert chosen.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_LEVEL" not in chosen.environment["vllm"]


def test_force_p2p_is_left_alone_on_driver_580() -> None:
    old = replace(hosts.TURIN_DIRECT, driver=Driver("580.95.05", True))
    decision = decide(old)
    assert not applied(decision, "module_option.nvidia.NVreg_RegistryDwords")
    assert "invalid device ordinal" in getattr(decision.find("module_option.nvidia.NVreg_RegistryDwords"), "reason", "")


def test_a_silent_card_serves_nothing() -> None:
    cards = list(hosts.TURIN_DIRECT.gpus)
    cards[3] = replace(cards[3], answers=False)
    assert settings(replace(hosts.TURIN_DIRECT, gpus=tuple(cards))).gpus == (0, 1, 2, 4, 5, 6, 7)


def test_an_override_wins_and_is_shown() -> None:
    overrides = {
        "kernel_argument.iommu": "pt",
        "environment.NCCL_GRAPH_FILE": "/etc/kimi-rig/graph.xml",
        "power_limit.watts": "450",
        "kernel_argument.mitigations": "off",
        "sysctl.vm.max_map_count": "1048576",
    }
    decision = decide(hosts.TURIN_DIRECT, overrides)
    chosen = decision.host
    assert chosen.kernel_arguments == ("iommu=pt", "pcie_aspm=off", "pcie_port_pm=off", "mitigations=off")
    assert chosen.environment["vllm"]["NCCL_GRAPH_FILE"] == "/etc/kimi-rig/graph.xml"
    assert "NCCL_PROTO" not in chosen.environment["vllm"]
    assert chosen.memory_fraction["vllm.base"] == 0.93
    assert chosen.power_limit_w == 450
    assert chosen.sysctls["vm.max_map_count"] == "1048576"
    iommu = decision.find("kernel_argument.iommu")
    assert iommu is not None
    assert (iommu.value, iommu.replaces, iommu.confidence) == ("pt", "off", Confidence.OPERATOR)
    assert "hang" in iommu.reason


def test_trading_latency_for_many_users_is_an_override() -> None:
    chosen = decide(hosts.TURIN_DIRECT, {"environment.NCCL_P2P_DISABLE": "1"}).host
    assert chosen.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_LEVEL" not in chosen.environment["vllm"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"iommu": "off"},
        {"kernel.iommu": "off"},
        {"power_limit.watts": "450W"},
        {"memory_fraction.vllm.base": "2x"},
        {"memory_fraction.vllm.base": "1.5"},
        {"limit.LimitNOFILE": "1\nExecStartPre=/bin/true"},
        {"boot_unit.x;y": "1"},
    ],
)
def test_an_override_that_is_none_is_refused(overrides: dict[str, str]) -> None:
    with pytest.raises(TopologyError, match=next(iter(overrides))):
        decide(hosts.TURIN_DIRECT, overrides)


def test_kinds_have_names_an_operator_can_type() -> None:
    assert all(kind.value.isidentifier() for kind in Kind)


# --- Faults of the first edition: the right value of each

OPERATORS = "/etc/modprobe.d/nvidia-p2p-override.conf"
LIVE = "ForceP2P=0x11;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
DWORDS = "module_option.nvidia.NVreg_RegistryDwords"
CUSTOM = {"disable-custom-all-reduce": "true"}
NO_IOMMU: dict[str, Any] = {"iommu_groups": 0, "iommu_types": ()}


def with_dwords(facts: HostFacts, value: str, file: str | None = OPERATORS, driver: str = "595.58.03") -> HostFacts:
    """The host with RegistryDwords live, from a file of its operator's."""
    files = {file: f'options nvidia NVreg_RegistryDwords="{value}"\n'} if file else {}
    parameters = {**facts.driver.parameters, "RegistryDwords": value}
    return replace(
        facts, driver=replace(facts.driver, version=driver, on_disk=driver, parameters=parameters),
        boot_files={**facts.boot_files, **files},
    )  # fmt: skip


def reason(decision: Decision, key: str) -> str:
    setting = decision.find(key)
    assert setting is not None, key
    return setting.reason


def variables(facts: HostFacts, workload: Workload | None = None, **overrides: str | None) -> dict[str, str]:
    asked = {key.replace("__", "."): value for key, value in overrides.items()}
    return dict(decide(facts, asked, workload).host.environment["vllm"])


def test_a_container_is_asked_for_nothing_of_its_host() -> None:
    facts = replace(hosts.TURIN_DIRECT, container="docker", **NO_IOMMU)
    decision = decide(facts, {"module_option.nvidia.NVreg_EnableMSI": "1", "kernel_argument.quiet": "1"})
    assert reboot_pending(decision.settings, facts) == []
    assert not [one.key for one in decision.settings if one.applied and one.needs_reboot]
    for key in ("module_option.nvidia_uvm.uvm_disable_hmm", "kernel_argument.quiet", "sysctl.kernel.numa_balancing"):
        assert reason(decision, key).startswith("for the host outside this container")
    # The cards' places are known in a container on metal, and are its hypervisor's secret in one on a virtual machine.
    assert decision.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"
    assert "NCCL_P2P_LEVEL" not in variables(replace(facts, virtualisation="kvm"))
    translated = replace(facts, iommu_groups=90, iommu_types=("DMA-FQ",))
    assert variables(translated)["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.parametrize(
    "live",
    [
        LIVE,
        "EnableResizableBar=1;ForceP2P=0x11;GrdmaPciTopoCheckOverride=1",
        f"{LIVE};PowerMizerEnable=0x1",
        "ForceP2P=17",
    ],
)
def test_registry_keys_that_are_live_and_valid_are_kept(live: str) -> None:
    for archetype in (hosts.WORKSTATION_4, hosts.ESC8000A, hosts.MIXED):
        facts = with_dwords(archetype, live)
        setting = decide(facts).find(DWORDS)
        assert setting is not None and not setting.applied and setting.kept and setting.value == live
        assert OPERATORS in setting.reason
        assert standing(setting, facts) is Standing.KEPT
        assert DWORDS not in [one.key for one in reboot_pending(decide(facts).settings, facts)]


def test_registry_keys_of_ours_stay_as_they_were_written() -> None:
    five = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
    facts = with_dwords(hosts.WORKSTATION_4, five, MODPROBE)
    assert decide(facts).host.module_options["nvidia"]["NVreg_RegistryDwords"] == five
    assert standing(next(one for one in decide(facts).settings if one.key == DWORDS), facts) is Standing.LIVE
    assert "RMForceP2PType" not in decide(hosts.WORKSTATION_4).host.module_options["nvidia"]["NVreg_RegistryDwords"]


def test_other_registry_keys_stay_beside_ours_and_a_file_that_wins_is_named() -> None:
    early = with_dwords(hosts.WORKSTATION_4, "PowerMizerEnable=0x1", "/etc/modprobe.d/a.conf")
    decision = decide(early)
    assert decision.host.module_options["nvidia"]["NVreg_RegistryDwords"] == f"PowerMizerEnable=0x1;{FORCE_P2P}"
    # Nothing is staged before a deploy, whoever set the option.
    assert standing(next(one for one in decision.settings if one.key == DWORDS), early) is Standing.PENDING
    late = decide(with_dwords(hosts.WORKSTATION_4, "PowerMizerEnable=0x1"))
    assert not applied(late, DWORDS)
    assert f"{OPERATORS} says PowerMizerEnable=0x1, and wins over ours" in reason(late, DWORDS)
    line = (*(hosts.WORKSTATION_4.command_line or ()), "nvidia-uvm.uvm_disable_hmm=1")
    assert applied(decide(replace(hosts.WORKSTATION_4, command_line=line)), "module_option.nvidia_uvm.uvm_disable_hmm")
    wins = {"/etc/modprobe.d/uvm.conf": "options nvidia-uvm uvm_disable_hmm=0\n"}
    other = decide(replace(hosts.WORKSTATION_4, boot_files={**hosts.WORKSTATION_4.boot_files, **wins}))
    assert "uvm.conf says 0, and wins over ours" in reason(other, "module_option.nvidia_uvm.uvm_disable_hmm")


@pytest.mark.parametrize("count", [2, 8])
def test_ranks_without_p2p_do_without_a_custom_all_reduce(count: int) -> None:
    """rtx6kpro#15, vllm#51513: NCCL_P2P_DISABLE alone leaves the engines' own all-reduce on at two ranks."""
    rows = tuple(tuple("X" if a == b else "CNS" for b in range(8)) for a in range(8))
    facts = replace(hosts.TURIN_DIRECT, p2p=rows)
    chosen = decide(facts, None, Workload(tuple(range(count)), count)).host
    assert chosen.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    assert chosen.engine_flags == {"vllm": CUSTOM, "sglang": CUSTOM}


def test_two_ranks_on_a_large_host_are_two_ranks() -> None:
    decision = decide(hosts.TURIN_DIRECT, None, Workload((0, 1), 2, "2.27.5"))
    environment = decision.host.environment["vllm"]
    assert environment["NCCL_P2P_LEVEL"] == "PHB"
    assert not {"NCCL_MIN_NCHANNELS", "NCCL_PROTO"} & environment.keys()
    assert (decision.host.engine_flags, decision.host.memory_fraction) == ({}, {})
    across = decide(hosts.TURIN_DIRECT, None, Workload((0, 7), 2)).host
    assert across.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"
    single = decide(hosts.TURIN_DIRECT, None, Workload((3,), 1)).host
    assert not any(name.startswith("NCCL_") for name in single.environment["vllm"])
    # The host itself is the same for all.
    assert decision.host.kernel_arguments == across.kernel_arguments == decide(hosts.TURIN_DIRECT).host.kernel_arguments


@pytest.mark.parametrize(
    "overrides",
    [
        {"kernel_argument.iommu": None},
        {"kernel_argument.iommu": None, "kernel_argument.amd_iommu": None},
        {"kernel_argument.iommu": "on"},
        {"kernel_argument.amd_iommu": "force_enable"},
    ],
)
def test_p2p_is_not_used_under_an_iommu_that_the_operator_lets_translate(overrides: dict[str, str | None]) -> None:
    for count in (2, 8):
        decision = decide(hosts.TURIN_DIRECT, overrides, Workload(tuple(range(count)), count, "2.27.5"))
        assert not [token for token in decision.host.kernel_arguments if token.endswith("iommu=off")]
        environment = decision.host.environment["vllm"]
        assert environment["NCCL_P2P_DISABLE"] == "1"
        assert not {"NCCL_P2P_LEVEL", "NCCL_PROTO"} & environment.keys()
        assert decision.host.engine_flags["vllm"] == CUSTOM
        assert "IOMMU translates" in reason(decision, "environment.NCCL_P2P_DISABLE")


def test_the_simple_protocol_is_for_stock_nccl_on_two_turin() -> None:
    key = "environment.NCCL_PROTO"
    for version in ("2.27.5", "2.28.9"):
        decision = decide(hosts.TURIN_DIRECT, None, Workload(nccl=version))
        assert applied(decision, key)
        assert "at 32 streams" in reason(decision, key)
    for unfit in ("2.29.2", "2.30.7", None):
        decision = decide(hosts.TURIN_DIRECT, None, Workload(nccl=unfit))
        assert not applied(decision, key)
        assert "no figure is published" in reason(decision, key)
    assert decide(hosts.ESC8000A, None, Workload(nccl="2.27.5")).find(key) is None
    genoa = machine(replace(hosts.GENOA, sockets=2), hosts.direct(8))
    found = decide(genoa, None, Workload(nccl="2.27.5")).find(key)
    assert found is not None and not found.applied and authors(found.supports) == 1


def test_one_socket_of_several_numa_nodes_is_one_socket() -> None:
    facts = machine(replace(hosts.TURIN, sockets=1), hosts.direct(8, numa=(0, 1, 2, 3)), numa_nodes=4)
    decision = decide(facts, None, Workload(nccl="2.27.5"))
    assert decision.find("environment.NCCL_PROTO") is None
    assert decision.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"
    assert "several NUMA nodes of one socket" in reason(decision, "environment.NCCL_P2P_LEVEL")


def test_cards_of_a_guest_keep_their_iommu_and_serve_nothing() -> None:
    cards = [
        replace(card, bound_to="vfio-pci", answers=False) if card.index > 5 else card
        for card in hosts.TURIN_DIRECT.gpus
    ]
    facts = replace(hosts.TURIN_DIRECT, gpus=tuple(cards))
    decision = decide(facts)
    assert not [token for token in decision.host.kernel_arguments if "iommu" in token]
    assert "vfio-pci" in reason(decision, "kernel_argument.iommu")
    assert decision.host.gpus == (0, 1, 2, 3, 4, 5)
    assert decision.host.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    assert ACS_UNIT not in decision.host.boot_units
    passing = replace(facts, command_line=("ro", "iommu=pt"), iommu_types=("identity",))
    assert variables(passing)["NCCL_P2P_LEVEL"] == "SYS"


@pytest.mark.parametrize(
    ("change", "arguments", "state"),
    [
        ({"command_line": ("iommu.passthrough=1",), "iommu_types": ("identity",)}, (), Iommu.PASSTHROUGH),
        ({"iommu_types": ("identity",)}, (), Iommu.PASSTHROUGH),
        ({"command_line": ("amd_iommu=on", "iommu=pt"), "iommu_types": ("DMA", "identity")}, (), Iommu.PASSTHROUGH),
        ({"command_line": ("iommu=nomerge,pt",), "iommu_types": ()}, (), Iommu.PASSTHROUGH),
        ({"command_line": ("ro", "iommu=off"), **NO_IOMMU}, ("iommu=off",), Iommu.OFF),
        ({"command_line": ("ro", "amd_iommu=off"), **NO_IOMMU}, ("amd_iommu=off",), Iommu.OFF),
        (NO_IOMMU, (), Iommu.OFF),
        ({}, ("iommu=off", "amd_iommu=off"), Iommu.TRANSLATING),
    ],
)
def test_what_the_iommu_does_decides_what_is_asked(
    change: dict[str, Any], arguments: tuple[str, ...], state: Iommu
) -> None:
    facts = replace(hosts.TURIN_DIRECT, **change)
    decision = decide(facts)
    assert Situation(facts, {}, facts.gpus).iommu is state
    assert tuple(token for token in decision.host.kernel_arguments if "iommu" in token) == arguments
    pending = {one.name for one in reboot_pending(decision.settings, facts)} & {"iommu", "amd_iommu"}
    assert bool(pending) is (state is Iommu.TRANSLATING)
    assert decision.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"


def test_an_unknown_card_is_left_alone_until_the_driver_says_how_it_is_linked() -> None:
    h100 = [
        replace(card, pci_id="10de:2330", compute_capability=None, memory_mib=None) for card in hosts.XEON_DIRECT.gpus
    ]
    bare = replace(hosts.bare(replace(hosts.XEON_DIRECT, gpus=tuple(h100))), relations_guessed=True)
    decision = decide(bare)
    assert (decision.host.kernel_arguments, decision.host.module_options) == ((), {})
    assert not any(name.startswith("NCCL_") for name in decision.host.environment["vllm"])
    nvlink = tuple(tuple("X" if a == b else "NV18" for b in range(8)) for a in range(8))
    answering = tuple(replace(card, answers=True) for card in h100)
    assert decide(replace(hosts.XEON_DIRECT, gpus=answering, relations=nvlink)).host.kernel_arguments == ()
    pcie = decide(replace(hosts.XEON_DIRECT, gpus=answering))
    assert pcie.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"
    assert pcie.find(DWORDS) is None  # reported for RTX PRO 6000 alone


@pytest.mark.parametrize(
    ("facts", "words", "absent"),
    [(hosts.MAX_Q_8, "300 W as shipped", "500 W"), (hosts.TURIN_DIRECT, "500 W is about 600 W", "as shipped")],
)
def test_power_advice_is_of_the_card_itself(facts: HostFacts, words: str, absent: str) -> None:
    text = reason(decide(facts), "power_limit.watts")
    assert words in text and absent not in text


def test_a_ring_where_writes_of_one_switch_would_collapse() -> None:
    assert variables(hosts.ESC8000A)["NCCL_ALGO"] == "Ring"
    found = decide(hosts.ESC8000A).find("environment.NCCL_ALGO")
    assert found is not None and authors(found.supports) == 2
    assert "NCCL_ALGO" not in variables(hosts.GENOA_SWITCHED)  # two switches: one other port
    assert "NCCL_ALGO" not in variables(replace(hosts.ESC8000A, cpu=hosts.XEON))
    microchip = {address: replace(bridge, pci_id="11f8:5000") for address, bridge in hosts.ESC8000A.bridges.items()}
    assert decide(replace(hosts.ESC8000A, bridges=microchip)).find("environment.NCCL_ALGO") is None
    four = machine(hosts.THREADRIPPER, hosts.switched(16, 4))
    single = decide(replace(four, bridges={a: replace(b, pci_id="1f18:0101") for a, b in four.bridges.items()}))
    assert not applied(single, "environment.NCCL_ALGO")
    assert "4 cards a switch" in reason(single, "environment.NCCL_ALGO")


@pytest.mark.parametrize(
    "live", ["ForceP2P=011", "ForceP2P=09", "ForceP2P=0x", "PerfLevelSrc=0x2222; PowerMizerEnable=0x1"]
)
def test_registry_keys_in_any_notation_are_read(live: str) -> None:
    decision = decide(with_dwords(hosts.TURIN_DIRECT, live))
    text = decision.host.module_options["nvidia"].get("NVreg_RegistryDwords", "")
    assert " " not in text


@pytest.mark.parametrize("override", [{"power_limit.foo": "abc"}, {"power_limit.watts": "\u00b2"}])
def test_a_power_limit_is_whole_watts_on_any_host(override: dict[str, str | None]) -> None:
    for facts in (hosts.TURIN_DIRECT, HostFacts()):
        with pytest.raises(TopologyError):
            decide(facts, override)


# --- Faults that later examinations found


@pytest.mark.parametrize("token", ["iommu=pt", "iommu.passthrough=1"])
@pytest.mark.parametrize("overrides", [{}, {"kernel_argument.iommu": "pt"}])
def test_groups_that_translate_outweigh_a_token_that_asks_for_passthrough(
    token: str, overrides: dict[str, str]
) -> None:
    """The IOMMU is kept as it is, and P2P is not used under it."""
    facts = replace(hosts.TURIN_DIRECT, command_line=("ro", token, "iommu=pt"), iommu_types=("DMA-FQ",))
    decision = decide(facts, overrides, Workload((0, 1), 2))
    assert Situation(facts, {}, facts.gpus).iommu is Iommu.TRANSLATING
    assert not [one for one in decision.host.kernel_arguments if one.endswith("iommu=off")]
    assert not [one.key for one in reboot_pending(decision.settings, facts) if "iommu" in one.key]
    assert decision.host.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    assert decision.host.engine_flags["vllm"] == CUSTOM
    if not overrides:
        assert "groups translate all the same" in reason(decision, "kernel_argument.iommu")


@pytest.mark.parametrize("name", ["desktop", "refused", "kept"])
def test_nothing_is_forced_where_p2p_stays_off(name: str) -> None:
    refused = tuple(tuple("X" if a == b else "CNS" for b in range(8)) for a in range(8))
    facts, overrides = {
        "desktop": (hosts.CORE_ULTRA_2, {}),
        "refused": (replace(hosts.TURIN_DIRECT, p2p=refused), {}),
        "kept": (hosts.TURIN_DIRECT, {"kernel_argument.iommu": None}),
    }[name]
    decision = decide(facts, overrides)
    assert not applied(decision, DWORDS)
    assert "nothing to force" in reason(decision, DWORDS)
    # The IOMMU is no matter of correctness there: an engine that was accepted on this boot starts again.
    accepted = replace(facts, accepted=("one",))
    needed = [one.key for one in reboot_needed(decide(accepted, overrides).settings, accepted)]
    assert needed == []
    # Some pairs may, so those that do are served.
    some = [list(row) for row in refused]
    some[0][1] = some[1][0] = "OK"
    assert applied(decide(replace(hosts.TURIN_DIRECT, p2p=tuple(map(tuple, some)))), DWORDS)


def test_one_rank_needs_no_iommu_to_be_off() -> None:
    facts = replace(hosts.TURIN_DIRECT, accepted=("one",))
    single, pair = (decide(facts, None, Workload((0, 1)[:count], count)) for count in (1, 2))
    assert reboot_needed(single.settings, facts) == []
    assert [one.name for one in reboot_needed(pair.settings, facts)] == ["iommu", "amd_iommu"]


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, True),
        ({"NCCL_P2P_DISABLE": " 0x1"}, True),
        ({"NCCL_P2P_DISABLE": "0"}, False),
        ({"NCCL_P2P_LEVEL": "LOC"}, True),
        ({"NCCL_P2P_LEVEL": "NVL"}, True),
        ({"NCCL_P2P_LEVEL": "PXB"}, True),
        ({"NCCL_P2P_LEVEL": "2"}, True),
        ({"NCCL_P2P_LEVEL": "PHB"}, False),
        ({"NCCL_P2P_LEVEL": "SYS"}, False),
        ({"NCCL_P2P_LEVEL": "no level"}, False),
    ],
)
def test_whoever_has_nccl_do_without_p2p_has_no_custom_all_reduce(variables: dict[str, str], left: bool) -> None:
    overrides: dict[str, str | None] = {f"environment.{name}": value for name, value in variables.items()}
    for asked, given in ((overrides, {}), ({}, variables)):
        decision = decide(hosts.TURIN_DIRECT, asked, Workload((0, 1), 2, environment=given))
        assert (decision.host.engine_flags.get("vllm") == CUSTOM) is left


def test_more_cpus_than_an_apic_names_keep_an_iommu_that_passes_through() -> None:
    """iommu/amd without x2APIC: 224 of 448 CPUs came up."""
    facts = replace(hosts.TURIN_DIRECT, cpu=replace(hosts.TURIN, threads=448))
    decision = decide(facts, None, Workload((0, 1), 2))
    assert [token for token in decision.host.kernel_arguments if "iommu" in token] == ["iommu=pt"]
    assert decision.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "PHB"
    # It stays in the file of ours once it is live, and P2P is off should the groups translate all the same.
    files = {one.path: one.text for one in host_files(decision.host, facts)}
    after = replace(facts, boot_files=files, command_line=("ro", *decision.host.kernel_arguments))
    assert decide(replace(after, iommu_types=("identity",))).host.kernel_arguments == decision.host.kernel_arguments
    still = decide(after, None, Workload((0, 1), 2)).host
    assert still.kernel_arguments == decision.host.kernel_arguments
    assert still.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    # One that is off, with all CPUs there, is left so.
    off = replace(facts, command_line=("iommu=off", "amd_iommu=off"), **NO_IOMMU)
    assert decide(off).host.kernel_arguments[:2] == ("iommu=off", "amd_iommu=off")


def test_the_operator_who_switches_the_iommu_off_is_followed_for_cards_of_a_guest_too() -> None:
    cards = [replace(card, bound_to="vfio-pci") if card.index > 5 else card for card in hosts.TURIN_DIRECT.gpus]
    facts = replace(hosts.TURIN_DIRECT, gpus=tuple(cards))
    decision = decide(facts, {"kernel_argument.iommu": "off"})
    assert "iommu argument is followed" in reason(decision, "kernel_argument.amd_iommu")
    assert decision.host.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"


def test_an_operator_who_does_not_force_is_followed() -> None:
    for file, loaded in ((OPERATORS, True), ("/etc/modprobe.d/a.conf", True), (OPERATORS, False)):
        facts = with_dwords(hosts.WORKSTATION_4, "ForceP2P=0;PowerMizerEnable=0x1", file)
        if not loaded:
            facts = replace(facts, driver=replace(facts.driver, parameters={"RegistryDwords": ""}))
        decision = decide(facts)
        setting = decision.find(DWORDS)
        assert setting is not None and not setting.applied and not setting.blocked
        assert setting.value == "ForceP2P=0;PowerMizerEnable=0x1"
        assert f"comes from {file} with another value" in setting.reason
        assert setting.kept is loaded
    ours = decide(with_dwords(hosts.WORKSTATION_4, "ForceP2P=0;PowerMizerEnable=0x1", MODPROBE))
    assert ours.host.module_options["nvidia"]["NVreg_RegistryDwords"] == f"PowerMizerEnable=0x1;{FORCE_P2P}"


def test_registry_keys_that_no_file_of_ours_can_hold_are_their_owners() -> None:
    facts = with_dwords(hosts.WORKSTATION_4, "X={1}", "/etc/modprobe.d/a.conf")
    decision = decide(facts)
    assert not applied(decision, DWORDS)
    assert "a file of ours cannot hold 'X={1}', which comes from /etc/modprobe.d/a.conf" in reason(decision, DWORDS)
    host_files(decision.host, facts)


def test_reasons_say_what_becomes_of_the_old_keys() -> None:
    five = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
    for file in (MODPROBE, OPERATORS):
        assert "are live here and kept" in reason(decide(with_dwords(hosts.WORKSTATION_4, five, file)), DWORDS)
    assert "are left out" in reason(decide(hosts.WORKSTATION_4), DWORDS)


def test_a_host_without_a_boot_loader_of_ours_is_not_waited_for() -> None:
    facts = replace(hosts.TURIN_DIRECT, boot_loader=None)
    decision = decide(facts, None, Workload((0, 1), 2))
    assert decision.host.kernel_arguments == ()
    assert "neither grub nor systemd-boot" in reason(decision, "kernel_argument.iommu")
    assert decision.host.environment["vllm"]["NCCL_P2P_DISABLE"] == "1"
    live = replace(facts, command_line=("iommu=off", "pcie_aspm=off"), **NO_IOMMU)
    assert decide(live).host.kernel_arguments == ("iommu=off", "pcie_aspm=off")
    assert decide(live).host.environment["vllm"]["NCCL_P2P_LEVEL"] == "SYS"


def test_the_driver_of_the_next_boot_decides_on_its_options() -> None:
    for loaded, staged, force in (("580.95.05", "595.58.03", True), ("595.58.03", "580.95.05", False)):
        facts = replace(hosts.TURIN_DIRECT, driver=Driver(loaded, True, on_disk=staged))
        assert applied(decide(facts), DWORDS) is force


def test_a_ring_is_for_switches_that_were_reported() -> None:
    other = {address: replace(bridge, pci_id="10b5:8796") for address, bridge in hosts.ESC8000A.bridges.items()}
    assert decide(replace(hosts.ESC8000A, bridges=other)).find("environment.NCCL_ALGO") is None


@pytest.mark.parametrize("name", sorted(hosts.ALL))
def test_what_a_reason_cites_is_in_the_evidence(name: str) -> None:
    for one in decide(hosts.ALL[name]).settings:
        evidence = " ".join(str(report) for report in (*one.supports, *one.against))
        cited = re.findall(r"[\w.-]+/[\w./-]+(?:#\d+|\.(?:py|md|c))|Linux [\d.]+", one.reason)
        assert not [source for source in cited if source not in evidence], one.key


def test_of_cards_of_two_kinds_those_with_the_most_memory_serve() -> None:
    """A gaming card beside one RTX PRO 6000, first on the bus: published more than once."""
    for count in (1, 2):
        cards = hosts.direct(count + 1)
        cards[:count] = [replace(card, pci_id="10de:2b85", memory_mib=32607) for card in cards[:count]]
        assert decide(machine(hosts.GENOA, cards)).host.gpus == (count,)


def test_registry_keys_of_a_virtual_machine_are_shown_and_kept() -> None:
    facts = with_dwords(hosts.VIRTUAL, LIVE)
    setting = decide(facts).find(DWORDS)
    assert setting is not None and setting.kept and setting.value == LIVE
    assert decide(hosts.VIRTUAL).find(DWORDS) is None


def test_a_host_that_passes_through_already_is_not_advised_to() -> None:
    cards = [replace(card, bound_to="vfio-pci") if card.index > 5 else card for card in hosts.TURIN_DIRECT.gpus]
    facts = replace(hosts.TURIN_DIRECT, gpus=tuple(cards), iommu_types=("identity",))
    assert "kept as it is" in reason(decide(facts), "kernel_argument.iommu")
