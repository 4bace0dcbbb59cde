"""Hosts as their owners published them, and what they say of their settings. What a source leaves open is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rig.facts.host import Cpu, Driver, HostFacts
from rig.host.situation import Workload
from tests.unit.host_archetypes import (
    GENOA,
    MAX_Q,
    SERVER,
    THREADRIPPER,
    TURIN,
    WORKSTATION,
    XEON,
    bare,
    card,
    direct,
    machine,
    switched,
)

ALL_KEYS = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
FILE = "/etc/modprobe.d/owner.conf"
KEPT = "live, and kept"
IOMMU, AMD_IOMMU, INTEL_IOMMU = (f"kernel_argument.{name}" for name in ("iommu", "amd_iommu", "intel_iommu"))
HMM, DWORDS = "module_option.nvidia_uvm.uvm_disable_hmm", "module_option.nvidia.NVreg_RegistryDwords"
LEVEL, P2P_OFF, ALGO, PROTO, CHANNELS, CUMEM, IB = (
    f"environment.NCCL_{name}"
    for name in ("P2P_LEVEL", "P2P_DISABLE", "ALGO", "PROTO", "MIN_NCHANNELS", "CUMEM_ENABLE", "IB_DISABLE")
)
DEEP_GEMM = "environment.SGLANG_ENABLE_JIT_DEEPGEMM"
CUSTOM, ACS = "engine_flag.disable-custom-all-reduce", "boot_unit.kimi-acs.service"
GOVERNOR, WATTS = "governor.cpu", "power_limit.watts"
NO_IOMMU: dict[str, Any] = {"iommu_groups": 0, "iommu_types": ()}
PASSING: dict[str, Any] = {"command_line": ("ro", "amd_iommu=on", "iommu=pt"), "iommu_types": ("identity",)}
RTX_5090: dict[str, Any] = {"pci_id": "10de:2b85", "name": "NVIDIA GeForce RTX 5090", "memory_mib": 32607}


@dataclass(frozen=True)
class Published:
    """settings: as published, by key; None: not set. cards: those that served."""

    source: str
    facts: HostFacts
    workload: Workload
    settings: Mapping[str, str | None]
    cards: tuple[int, ...] | None = None
    overrides: Mapping[str, str | None] = field(default_factory=dict)


def amd(name: str, family: int, model: int, threads: int, sockets: int = 1) -> Cpu:
    return Cpu("AuthenticAMD", family, model, name, sockets, threads, ("schedutil",))


def with_driver(facts: HostFacts, version: str, dwords: str = "", options: str = "") -> HostFacts:
    """The host with another driver, RegistryDwords live from a file of its owner's, and further lines in it."""
    text = options + (f'options nvidia NVreg_RegistryDwords="{dwords}"\n' if dwords else "")
    driver = Driver(version, True, {**facts.driver.parameters, "RegistryDwords": dwords}, "hmm" in options, version)
    return replace(facts, driver=driver, boot_files={**facts.boot_files, FILE: text})


def of_maker(facts: HostFacts, pci_id: str) -> HostFacts:
    """The host with other switches."""
    bridges = {a: replace(b, pci_id=pci_id) if b.pci_id[:4] == "1000" else b for a, b in facts.bridges.items()}
    return replace(facts, bridges=bridges)


def generation(facts: HostFacts, value: int) -> HostFacts:
    return replace(facts, gpus=tuple(replace(gpu, link_gen=value, link_gen_max=value) for gpu in facts.gpus))


def guest(count: int, pci_id: str, kind: str, cpu: Cpu = TURIN) -> HostFacts:
    """A virtual machine, which shows its cards on one bridge."""
    cards = [card(index, pci_id, "pci0000:00", None) for index in range(count)]
    return machine(replace(cpu, governors=()), cards, virtualisation=kind, **NO_IOMMU)


HMM_OFF = "options nvidia_uvm uvm_disable_hmm=1\n"
AM5 = amd("AMD Ryzen 9 9950X 16-Core Processor", 26, 0x44, 32)
MIXED_PAIRS = [
    replace(gpu, numa_node=gpu.index // 4, pci_id=MAX_Q if gpu.index > 3 else SERVER) for gpu in switched(6, 2, SERVER)
]
DESKTOP = [card(index, WORKSTATION, f"pci0000:00/0000:00:01.{index + 1}", None) for index in range(2)]
CHAIN = [
    card(
        i,
        MAX_Q,
        f"pci0000:20/0000:20:01.1/0000:21:00.0/0000:22:0{i // 4}.0/0000:3{i // 4}:00.0/0000:4{i // 4}:0{i}.0",
        0,
    )
    for i in range(8)
]
GEN_4 = generation(machine(amd("AMD Ryzen Threadripper PRO 5975WX", 25, 8, 64), direct(4, MAX_Q, (0,))), 4)
BROADCOM_XEON = machine(XEON, switched(8, 2, SERVER, (0, 1)))
VGPU = machine(replace(TURIN, threads=128), direct(4), **PASSING)
HYPERVISOR = bare(machine(THREADRIPPER, direct(4, MAX_Q, (0,)), **PASSING))
TWO = Workload(None, 2, "2.28.9")
FOUR, EIGHT = replace(TWO, ranks=4), replace(TWO, ranks=8)

HOSTS = (
    Published(
        "EfficientMoE/Omni-Infinity docs/multigpu_platform.md",
        with_driver(machine(replace(TURIN, threads=128), MIXED_PAIRS), "590.48.01", "PeerMappingOverride=1;"),
        Workload((0, 1, 2, 3), 4, "2.29.7"),
        {IOMMU: "off", HMM: "1", CHANNELS: "8", P2P_OFF: None, ALGO: None, DWORDS: None},
        (0, 1, 2, 3),
    ),
    Published(
        "peterstorm/.dotfiles",
        with_driver(
            machine(replace(AM5, governors=("performance",)), DESKTOP, boot_loader="systemd-boot", **PASSING),
            "595.58.03",
            ALL_KEYS,
            HMM_OFF,
        ),
        TWO,
        {IOMMU: None, DWORDS: KEPT, HMM: "1", GOVERNOR: "performance", WATTS: None, P2P_OFF: None},
    ),
    Published(
        "vllm-project/vllm#51513, J-Oe-2",
        with_driver(GEN_4, "595.84"),
        Workload((0, 1), 2, "2.29.7"),
        {P2P_OFF: "1", CUSTOM: "true", ACS: "enabled", DWORDS: None},
        overrides={IOMMU: None},
    ),
    Published(
        "local-inference-lab/vllm#262",
        machine(
            amd("AMD Ryzen Threadripper 9970X 32-Cores", 26, 8, 64), direct(4, WORKSTATION, (0,)),
            command_line=("amd_iommu=off",), **NO_IOMMU,
        ),
        replace(FOUR, nccl="2.30.7"),
        {AMD_IOMMU: "off", IB: "1"},
    ),
    Published(
        "0xSero/local-ai-registry#1",
        with_driver(machine(AM5, [replace(gpu, pci_id=MAX_Q, link_width=8) for gpu in DESKTOP]), "580.95.05"),
        TWO,
        {WATTS: None, DWORDS: None, "attention.sglang": "triton"},
    ),
    Published(
        "NVIDIA/nccl#2418",
        with_driver(machine(replace(XEON, sockets=1), direct(2, WORKSTATION, (0,))), "580.173.02"),
        replace(TWO, nccl="2.26.2"),
        {DWORDS: None, P2P_OFF: None},
    ),
    Published(
        "sgl-project/sglang#18870",
        with_driver(guest(8, SERVER, "amazon", XEON), "580.126.09"),
        EIGHT,
        {IOMMU: None, INTEL_IOMMU: None, LEVEL: None, DEEP_GEMM: "0"},
    ),
    Published(
        "a recipe for GLM-5.3 on g4-standard-384, one node",
        guest(8, SERVER, "google"),
        EIGHT,
        {IB: "1", CHANNELS: "8", LEVEL: None, CUMEM: None, DEEP_GEMM: "0"},
    ),
    Published(
        "a power sweep on SYS-322GA-NR, 288 threads",
        machine(replace(XEON, threads=288), direct(4, SERVER)),
        FOUR,
        {WATTS: None, INTEL_IOMMU: "off"},
    ),
    Published(
        "bigstack-oss/cubecos#312",
        replace(
            VGPU,
            gpus=tuple(replace(gpu, bound_to="nvidia_vgpu_vfio" if gpu.index % 2 else "nvidia") for gpu in VGPU.gpus),
        ),
        TWO,
        {IOMMU: None, ACS: None},
        (0, 2),
    ),
    Published(
        "a container on two Xeon 8470Q",
        machine(replace(XEON, threads=50, governors=()), direct(2), container="docker", boot_loader=None),
        TWO,
        {INTEL_IOMMU: None, HMM: None, ACS: None, P2P_OFF: "1", CUSTOM: "true"},
    ),
    Published(
        "0xSero/deepseek-v4-flash-sm120#4",
        with_driver(machine(THREADRIPPER, direct(4, MAX_Q, (0,))), "580.159.03"),
        FOUR,
        {DWORDS: None, PROTO: None},
    ),
    Published(
        "Visual-Synthesizer, EPYC 4564P behind one PM50100",
        of_maker(
            with_driver(
                machine(amd("AMD EPYC 4564P", 25, 0x61, 32), switched(2, 2, WORKSTATION), command_line=("pci=noacs",)),
                "590.48.01",
                options=HMM_OFF,
            ),
            "11f8:5000",
        ),
        TWO,
        {HMM: "1", DWORDS: None, ALGO: None, P2P_OFF: None, ACS: "enabled"},
    ),
    Published(
        "purplepow3r, two Turin, 4 cards and 2 RTX 5090",
        machine(TURIN, [replace(gpu, **RTX_5090) if gpu.index > 3 else gpu for gpu in direct(6, WORKSTATION)]),
        Workload((0, 1, 2, 3), 4, "2.28.9"),
        {LEVEL: "SYS", P2P_OFF: None},
        (0, 1, 2, 3),
    ),
    Published(
        "orangezed, two EPYC 9374F",
        machine(replace(GENOA, sockets=2, threads=128), direct(8, MAX_Q)),
        EIGHT,
        {LEVEL: "SYS", P2P_OFF: None, ALGO: None},
    ),
    Published(
        "luke, WRX90E with leaf and root switches",
        of_maker(machine(THREADRIPPER, CHAIN), "11f8:5000"),
        EIGHT,
        {DWORDS: None, CHANNELS: "8", ACS: "enabled", ALGO: None},
    ),
    Published(
        "Grimulkan, one Turin, 16 cards behind 4 switches",
        of_maker(machine(replace(TURIN, sockets=1, threads=128), switched(16, 4, WORKSTATION)), "11f8:5000"),
        replace(TWO, ranks=16),
        {CHANNELS: "8", PROTO: None, DWORDS: None},
    ),
    Published("Ixtrix, a guest of Proxmox", guest(4, MAX_Q, "kvm"), FOUR, {IOMMU: None, LEVEL: None, ACS: None}),
    Published(
        "Ixtrix, its host",
        replace(
            HYPERVISOR,
            gpus=tuple(replace(gpu, bound_to="vfio-pci") for gpu in HYPERVISOR.gpus),
        ),
        FOUR,
        {IOMMU: None, ACS: None},
        (),
    ),
    Published(
        "GLM-5.2 NF3, PCIe gen 3 behind PLX switches",
        of_maker(generation(machine(replace(XEON, sockets=1), switched(4, 2, WORKSTATION)), 3), "10b5:8747"),
        FOUR,
        {ALGO: None, DWORDS: None},
    ),
    Published(
        "two cards on two sockets, IOMMU off",
        with_driver(machine(replace(GENOA, sockets=2), direct(2, WORKSTATION), **NO_IOMMU), "595.84"),
        TWO,
        {IOMMU: None, LEVEL: "SYS", P2P_OFF: None},
    ),
    Published(
        "a rented virtual machine with five keys",
        with_driver(guest(4, SERVER, "kvm"), "595.58.03", ALL_KEYS, HMM_OFF),
        FOUR,
        {DWORDS: KEPT, HMM: "1"},
    ),
    Published(
        "fakoli-dark, RTX 5090 and one Max-Q",
        machine(AM5, [replace(DESKTOP[0], **RTX_5090), replace(DESKTOP[1], pci_id=MAX_Q)]),
        Workload((1,), 1, "2.28.9"),
        {IOMMU: None, P2P_OFF: None},
        (1,),
    ),
    Published(
        "a journal of GLM-5.2, two Xeon behind 4 PEX89000",
        BROADCOM_XEON,
        EIGHT,
        {DWORDS: None, ACS: "enabled", P2P_OFF: None, ALGO: None, CUSTOM: "true"},
    ),
    Published("EPYC 7003, 2 cards", generation(machine(GENOA, direct(2, numa=(0,))), 4), TWO, {P2P_OFF: None}),
    Published(
        "linux-kernel 2026-03-19, more than 256 CPUs",
        machine(replace(TURIN, threads=512), direct(8)),
        EIGHT,
        {IOMMU: "pt", AMD_IOMMU: None},
    ),
)  # fmt: skip
