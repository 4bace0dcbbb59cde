"""The topology policy on hosts as they are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rig.facts.host import Driver, HostFacts, Unit
from rig.host.settings import ACS_UNIT, PERSISTENCE_UNIT, TIME_UNIT, Confidence, HostSettings, Kind
from rig.host.topology import FORCE_P2P, Decision, TopologyError, decide
from tests.unit import host_archetypes as hosts


def settings(facts: HostFacts) -> HostSettings:
    return decide(facts).host


def applied(decision: Decision, key: str) -> bool:
    setting = decision.find(key)
    return setting is not None and setting.applied


def test_two_turin_with_cards_on_the_cpus() -> None:
    chosen = settings(hosts.TURIN_DIRECT)
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
    assert chosen.engine_flags == {}


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


VENDORS = ("NVIDIA ", "systemd/systemd ", "vllm-project/", "sgl-project/", "deepseek-ai/", "Red Hat ")


@pytest.mark.parametrize("name", sorted(hosts.ALL))
def test_what_is_applied_rests_on_more_than_one_report(name: str) -> None:
    for one in decide(hosts.ALL[name]).settings:
        sources = [source.strip() for source in one.source.split(";")]
        # The published launches are several hosts' files; a measurement repeated for each version is several reports.
        several = len(set(sources)) > 1 or "compose files" in one.source or "versions v1" in one.source
        if one.applied and one.value is not None:
            assert several or sources[0].startswith(VENDORS), f"{one.key}: {one.source}"


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
