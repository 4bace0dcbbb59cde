"""Hosts as they are found, typed by hand: what the topology, explanation and preflight tests decide on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rig.facts.host import GPU_MODELS, Bridge, Cpu, DataPath, Disk, Driver, Gpu, HostFacts, relations_by_path

SERVER, WORKSTATION, MAX_Q, H200 = "10de:2bb5", "10de:2bb1", "10de:2bb4", "10de:2335"
TURIN = Cpu("AuthenticAMD", 26, 2, "AMD EPYC 9575F 64-Core Processor", 2, 256, ("schedutil",))
GENOA = Cpu("AuthenticAMD", 25, 17, "AMD EPYC 9374F 32-Core Processor", 1, 64, ("performance",))
THREADRIPPER = Cpu("AuthenticAMD", 25, 24, "AMD Ryzen Threadripper PRO 7955WX 16-Cores", 1, 32, ("powersave",))
XEON = Cpu("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Platinum 8462Y+", 2, 128, ("powersave",))
CORE = Cpu("GenuineIntel", 6, 198, "Intel(R) Core(TM) Ultra 5 245T", 1, 14, ("powersave",))
RANGES = {SERVER: (300.0, 600.0), WORKSTATION: (150.0, 600.0), MAX_Q: (250.0, 325.0), H200: (200.0, 700.0)}
NVME = Disk("nvme0n1", "mq-deadline")
TB = 1_000_000_000_000


def card(index: int, pci_id: str, path: str, numa: int | None, **more: object) -> Gpu:
    """A card as a working driver shows it; path: "host bridge/bridge/bridge"."""
    model, (low, high) = GPU_MODELS[pci_id], RANGES[pci_id]
    bridge, *bridges = path.split("/")
    gpu = Gpu(
        index, f"0000:{16 * (index + 1):02x}:00.0", pci_id, answers=True, name=model.name,
        compute_capability=model.compute_capability, memory_mib=model.memory_mib,
        bar1_bytes=128 << 30, link_gen=5, link_gen_max=5, link_width=16, link_width_max=16, power_limit_w=high,
        power_min_w=low, power_max_w=high, mig=False,
        numa_node=numa, host_bridge=bridge, bridges=tuple(bridges),
    )  # fmt: skip
    return replace(gpu, **more)  # type: ignore[arg-type]


def machine(cpu: Cpu, cards: Sequence[Gpu], **more: object) -> HostFacts:
    """A bare-metal Ubuntu 24.04 host around its cards, nothing tuned, ACS as the firmware left it."""
    count = len(cards)
    facts = HostFacts(
        gpus=tuple(cards),
        # A root port of AMD's, below it Broadcom's switches.
        bridges={
            address: Bridge(address, "1000:c030" if at else "1022:153b", True)
            for gpu in cards for at, address in enumerate(gpu.bridges)
        },
        relations=relations_by_path(cards),
        p2p=tuple(tuple("X" if a == b else "OK" for b in range(count)) for a in range(count)),
        processes=(),
        driver=Driver("590.48.01", True, {"RegistryDwords": "", "DynamicPowerManagement": "3"}, False, "590.48.01"),
        cpu=cpu, memory_bytes=1536 << 30, swap=False, numa_nodes=cpu.sockets, kernel="6.17.0-19-generic",
        command_line=("BOOT_IMAGE=/vmlinuz", "root=UUID=1", "ro", "quiet"),
        iommu_groups=90, iommu_types=("DMA-FQ",), virtualisation="none", container="none",
        os_id="ubuntu", os_version="24.04", glibc=(2, 39),
        paths={
            "/": DataPath("/", True, "/", "ext4", "/dev/nvme0n1p2", 2 * TB, TB, 1, (NVME,)),
            "/shared": DataPath("/shared", True, "/shared", "ext4", "/dev/nvme0n1p3", 4 * TB, 2 * TB, 2, (NVME,)),
            "/dev/shm": DataPath("/dev/shm", True, "/dev/shm", "tmpfs", "tmpfs", TB // 2, TB // 2, 3),
        },
        sysctls={"vm.swappiness": "60", "kernel.numa_balancing": "1", "kernel.sched_migration_cost_ns": None},
        unattended_upgrades=False, ports=(22,), secure_boot=False,
        boot_files={"/etc/default/grub": 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n'},
        boot_loader="grub",
        device_nodes=tuple(f"nvidia{index}" for index in range(count)), nvidia_uvm_node=True,
    )  # fmt: skip
    return replace(facts, **more)  # type: ignore[arg-type]


def direct(count: int, pci_id: str = SERVER, numa: Sequence[int | None] = (0, 1)) -> list[Gpu]:
    """Cards on root ports of their own, spread evenly over the NUMA nodes."""
    share = -(-count // len(numa))
    return [card(i, pci_id, f"pci0000:{i}0/0000:{i}0:01.1", numa[i // share]) for i in range(count)]


def switched(count: int, per_switch: int, pci_id: str = SERVER, numa: Sequence[int] = (0,)) -> list[Gpu]:
    """Cards behind switches, each switch on a root port of its own."""
    share = -(-count // len(numa))
    return [
        card(i, pci_id, f"pci0000:{s}0/0000:{s}0:01.1/0000:{s}1:00.0/0000:{s}2:{i:02x}.0", numa[i // share])
        for i in range(count)
        for s in [i // per_switch]
    ]


def bare(facts: HostFacts) -> HostFacts:
    """The same host before its driver is installed: what the first deploy sees."""
    cards = [
        replace(
            gpu, answers=None, power_limit_w=None,
            power_min_w=None, power_max_w=None, mig=None,
        )
        for gpu in facts.gpus
    ]  # fmt: skip
    return replace(
        facts, gpus=tuple(cards), relations=relations_by_path(cards), p2p=None, processes=None, driver=Driver(),
        device_nodes=(), nvidia_uvm_node=False,
    )  # fmt: skip


TURIN_DIRECT = machine(TURIN, direct(8))
ESC8000A = machine(TURIN, switched(8, 2, numa=(0, 1)))
GENOA_SWITCHED = machine(GENOA, switched(8, 4))
XEON_DIRECT = machine(XEON, direct(8))
WORKSTATION_4 = machine(THREADRIPPER, direct(4, WORKSTATION, (0,)))
MAX_Q_8 = machine(THREADRIPPER, switched(8, 4, MAX_Q))
CORE_ULTRA_2 = machine(CORE, direct(2, WORKSTATION, (None,)))
VIRTUAL = machine(
    replace(TURIN, sockets=1, threads=64, governors=()),
    [card(i, SERVER, "pci0000:00", None) for i in range(8)],
    virtualisation="kvm",
    iommu_groups=0,
)
MIXED = machine(TURIN, [*direct(4, SERVER, (0,)), *(replace(c, pci_id=WORKSTATION) for c in direct(6)[4:])])
H200_1 = machine(XEON, [card(0, H200, "pci0000:00/0000:00:01.0", 0)])
H200_8 = machine(
    XEON, direct(8, H200), relations=tuple(tuple("X" if a == b else "NV18" for b in range(8)) for a in range(8))
)
NO_GPU = machine(GENOA, [], driver=Driver())
ALL = {
    name: value for name, value in list(globals().items()) if isinstance(value, HostFacts)
}  # fmt: skip
