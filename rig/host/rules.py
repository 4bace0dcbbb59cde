"""The rules of the host policy. Pure.

Decode at 40 or 68 tok/s, prefill at 876 or 7,478, or a silent dead-lock come from settings that are right on one
topology and harmful on the next, and the sources contradict each other. So:

* a setting applies to what it was reported for (`where`), and to nothing else;
* one that rests on a single author is explained and not applied (rig/host/evidence.yaml);
* what is unknown, and what the operator has live and works, is left alone;
* the operator's override wins, and is shown as one.

A rule is one block here, one record or more in evidence.yaml under its name, and one test beside its like in
tests/unit/test_topology.py. Stages see the outcome of those before them: a rule of PEERS knows how the IOMMU ends.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from rig.host.settings import ACS_UNIT, ENGINES, PERSISTENCE_UNIT, TIME_UNIT, Kind
from rig.host.situation import P2P, Iommu, Links, Machine, Other, Situation, Versions
from rig.host.system_files import SAFE
from rigctl.contract.comparison import key_values

FORCE_P2P = "ForceP2P=0x11;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
METAL: Container[Machine] = (Machine.METAL,)
TRUE: Container[bool] = (True,)
FALSE: Container[bool] = (False,)
MANY = 10_000
SEVERAL, FOUR, EIGHT = range(2, MANY), range(4, MANY), range(8, MANY)
DRIVER_580 = Versions("580", "581")
AMD, INTEL = ("AuthenticAMD",), ("GenuineIntel",)
DIRECT, SWITCHED, MIXED = (Links.DIRECT,), (Links.SWITCHED,), (Links.MIXED,)

Where = Mapping[str, Container[Any]]
Text = str | Callable[[Situation], str]
Value = str | None | Callable[[Situation], str | None]


@dataclass(frozen=True)
class Rule:
    """A condition and a value. where: property of the Situation -> what it must be in; all must hold."""

    name: str
    kind: Kind
    setting: str
    value: Value
    reason: Text
    where: Where = field(default_factory=dict)
    machines: Container[Machine] = tuple(Machine)
    """Of METAL and VM; in a container the machine outside counts."""
    kept: Callable[[Situation], str | None] = lambda _: None
    """Why the host is left as it is; None to apply."""
    live: Callable[[Situation], bool] = lambda _: False
    """What is kept is live on the host and not ours."""
    applies: bool = True
    """False: explained, whatever the evidence."""
    gain: str = ""
    engines: tuple[str, ...] = ENGINES
    needed: Callable[[Situation], bool] = lambda _: False
    """Of a configuration: it must not start without."""

    def holds(self, situation: Situation) -> bool:
        """Whether the rule speaks of this situation at all."""
        if situation.outer not in self.machines:
            return False
        return all(getattr(situation, name) in allowed for name, allowed in self.where.items())


# --- The IOMMU -------------------------------------------------------------------------------------------------------


def _iommu_kept(name: str, value: str) -> Callable[[Situation], str | None]:
    """Why an argument is not wanted."""

    def why(s: Situation) -> str | None:
        own = f"kernel_argument.{name}" in s.overrides
        asked = s.iommu_asked is not None and (bool(s.taken) or s.iommu_asked is not Iommu.OFF)
        ours = value == "pt" and s.written(f"{name}={value}")
        cards = ", ".join(f"{gpu.address} ({gpu.bound_to})" for gpu in s.taken)
        cases = {
            "the operator's iommu argument is followed": asked and not own,
            "it passes through on this host, which others report to work as well: kept as it is": (
                s.iommu is Iommu.PASSTHROUGH and not ours
            ),
            f"cards are given to a guest, which needs the IOMMU: {cards}. iommu=pt is what the others could have": (
                bool(s.taken) and not ours
            ),
            "the command line asks for passthrough, and the IOMMU's groups translate all the same: kept as it is, "
            "without P2P. The kernel's log (iommu) says why; an override of kernel_argument.iommu changes it": (
                s.passing_asked and s.iommu is Iommu.TRANSLATING and not ours
            ),
            "none is at work on this host (no IOMMU groups), so nothing needs to be switched off": (
                s.iommu is Iommu.OFF and not s.live(f"{name}=off")
            ),
        }
        return next((text for text, holds in cases.items() if holds), None)

    return why


HANG = "an IOMMU that translates makes NCCL's P2P traffic between root ports hang"


def _iommu(rule: str, name: str, value: str, reason: Text, **where: Container[Any]) -> Rule:
    return Rule(
        rule,
        Kind.KERNEL_ARGUMENT,
        name,
        value,
        reason,
        where={"peers": TRUE, **where},
        machines=METAL,
        kept=_iommu_kept(name, value),
        needed=lambda s: s.ranks > 1 and not s.p2p_never,
    )


IOMMU = (
    _iommu("iommu-off", "iommu", "off", HANG, vendor=AMD, off_loses_cpus=FALSE),
    _iommu("amd-iommu-off", "amd_iommu", "off", HANG, vendor=AMD, off_loses_cpus=FALSE),
    _iommu(
        "iommu-pt",
        "iommu",
        "pt",
        lambda s: (
            f"{HANG}; one that is off takes x2APIC with it on AMD, and of {s.facts.cpu.threads} CPUs those beyond "
            "APIC number 255 do not come up. One that passes through is reported to work as well"
        ),
        vendor=AMD,
        off_loses_cpus=TRUE,
    ),
    _iommu("intel-iommu-off", "intel_iommu", "off", HANG, vendor=INTEL),
)

# --- The rest of the host --------------------------------------------------------------------------------------------


def _force_value(s: Situation) -> str:
    """What is live stays: the keys of others beside ours, ForceP2P with whatever keys it has."""
    keys = s.dwords if s.dwords_ours else s.dwords | key_values(s.dwords_file[1])
    if s.dwords_ours and not s.forced:
        keys.pop("ForceP2P", None)
    missing = [] if "ForceP2P" in keys else [one for one in FORCE_P2P.split(";") if one.partition("=")[0] not in keys]
    return ";".join([*(f"{name}={value}" for name, value in keys.items() if name), *missing])


def _live_kept(s: Situation) -> str | None:
    if not s.forced or s.dwords_ours:
        return None
    return f"live from {s.dwords_file[0] or 'elsewhere'}, and kept: the order of keys, and further keys, do not matter"


def _force_kept(s: Situation) -> str | None:
    where, value = s.dwords_file[0] or "elsewhere", _force_value(s)
    if (kept := _live_kept(s)) is not None:
        return kept
    if s.p2p_never or s.p2p is P2P.TRANSLATED:
        return "P2P stays off between these cards, so there is nothing to force"
    if not s.forced and FORCE_P2P.split(";", maxsplit=1)[0] not in value:
        return f"ForceP2P comes from {where} with another value, and is followed"
    if odd := [one for one in value.split(";") if not SAFE.fullmatch(one)]:
        return f"a file of ours cannot hold {odd[0]!r}, which comes from {where}: add the keys there"
    return None


def _live_force(s: Situation) -> str:
    return s.dwords_text if s.forced else FORCE_P2P


def _force_reason(s: Situation) -> str:
    old = sorted({"RMForceP2PType", "RMPcieP2PType"} & s.dwords.keys())
    kept = "are live here and kept as they are" if old else "are left out"
    return (
        "cards that hang on the CPU directly map each other's memory through system memory unless forced, and a custom "
        "all-reduce then runs at a fifteenth of NCCL's speed or switches itself off; NCCL itself is not affected. "
        f"RMForceP2PType and RMPcieP2PType, which the wiki lists too, {kept}: reports blame them for 'invalid device "
        "ordinal', and for broken cuMem IPC with NCCL 2.29 and newer"
    )


def _force(name: str, reason: Text, machines: Container[Machine] = METAL, **where: Container[Any]) -> Rule:
    return Rule(
        name,
        Kind.MODULE_OPTION,
        "nvidia.NVreg_RegistryDwords",
        _live_force,
        reason,
        where={"peers": TRUE, "rtx_pro": TRUE, **where},
        machines=machines,
        kept=_live_kept,
        live=lambda s: s.forced and not s.dwords_ours,
        applies=False,
    )


def _acs_reason(s: Situation) -> str:
    redirecting = [bridge.address for bridge in s.facts.bridges.values() if bridge.redirects]
    found = f" (now set on {len(redirecting)} of {len(s.facts.bridges)} bridges)" if s.facts.bridges else ""
    return (
        f"ACS request and completion redirect send traffic between cards up to the root port{found}; the firmware sets "
        "them anew at every boot. Only those two bits are cleared, and only on the bridges above the cards"
    )


def _power_reason(s: Situation) -> str:
    lows = [card.power_min_w for card in s.cards if card.power_min_w is not None]
    highs = [card.power_max_w for card in s.cards if card.power_max_w is not None]
    model = s.cards[0].model
    allowed = f"the cards allow {max(lows):g} to {min(highs):g} W" if lows and highs else "the range is unknown"
    text = f"never changed unasked; {allowed}"
    if model is not None and model.power_w == 600:
        return (
            f"{text}. 300 W cost 4 % for one user and 30 % at 64; 500 W is about 600 W. Limiting caused dropouts on "
            "one host and cured bus drops on another"
        )
    shipped = f"; {model.power_w} W as shipped" if model else ""
    return f"{text}{shipped}. No figure was published for this card: those of 600 W cards do not apply"


def _acs_kept(s: Situation) -> str | None:
    return "cards are given to a guest, which ACS keeps apart: left alone" if s.taken else None


def _memory(rule: str, setting: str, value: Value, reason: Text) -> Rule:
    where: Where = {"sm120": TRUE, "ranks": EIGHT}
    return Rule(rule, Kind.MEMORY_FRACTION, setting, value, reason, where=where, engines=(setting.partition(".")[0],))


PEERS: Where = {"peers": TRUE}
DRAFTER_ROOM = "the drafter, its cache and its graphs need room beside the fraction"

HOST = (
    Rule(
        "pcie-aspm",
        Kind.KERNEL_ARGUMENT,
        "pcie_aspm",
        "off",
        "link power states on the way to a card end in Surprise Link Down (AER uncorrectable status 0x20)",
        where=PEERS,
        machines=METAL,
    ),
    Rule(
        "pcie-port-pm",
        Kind.KERNEL_ARGUMENT,
        "pcie_port_pm",
        "off",
        "link power states on the way to a card end in Surprise Link Down (AER uncorrectable status 0x20)",
        where=PEERS,
        machines=METAL,
    ),
    Rule(
        "max-cstate",
        Kind.KERNEL_ARGUMENT,
        "processor.max_cstate",
        "1",
        "one user's choice, without figures",
        where=PEERS,
        machines=METAL,
    ),
    Rule(
        "mitigations",
        Kind.KERNEL_ARGUMENT,
        "mitigations",
        "off",
        "one reference host; gives up security and is not needed for P2P",
        where=PEERS,
        machines=METAL,
    ),
    Rule(
        "acs-override",
        Kind.KERNEL_ARGUMENT,
        "pcie_acs_override",
        "downstream,multifunction",
        f"works on a patched kernel only; {ACS_UNIT} does the same at run time",
        where=PEERS,
        machines=METAL,
    ),
    Rule(
        "hmm",
        Kind.MODULE_OPTION,
        "nvidia_uvm.uvm_disable_hmm",
        "1",
        "with heterogeneous memory management on, NCCL's P2P operations lock up on hosts with several cards",
        where=PEERS,
    ),
    Rule(
        "dynamic-power",
        Kind.MODULE_OPTION,
        "nvidia.NVreg_DynamicPowerManagement",
        "0x00",
        "cards that go to sleep let their links flap (1,415 transitions in 2 minutes at idle on one host)",
        where=PEERS,
        machines=METAL,
    ),
    Rule(
        "force-p2p",
        Kind.MODULE_OPTION,
        "nvidia.NVreg_RegistryDwords",
        _force_value,
        _force_reason,
        where={"peers": TRUE, "rtx_pro": TRUE, "links": DIRECT, "driver": Other(DRIVER_580)},
        machines=METAL,
        kept=_force_kept,
        live=lambda s: "ForceP2P" in s.dwords and not s.dwords_ours,
        gain="decode 60 -> 100 tok/s on 4 cards with a custom all-reduce; none with NCCL alone",
    ),
    _force(
        "force-p2p-580",
        "needed on cards that hang on the CPU directly, but on driver 580 one host's peer copies then failed with "
        "'invalid device ordinal': left alone on that driver",
        links=DIRECT,
        driver=DRIVER_580,
    ),
    _force(
        "force-p2p-switched",
        "for cards that hang on the CPU directly; behind a switch it is not needed, and one host gained 30 to 50 % by "
        "removing it and clearing ACS",
        links=SWITCHED,
    ),
    _force(
        "force-p2p-mixed",
        "nothing was published for cards of which some hang on the CPU directly and some behind a switch",
        links=MIXED,
    ),
    _force(
        "force-p2p-vm",
        "in a virtual machine the path between two cards is the hypervisor's secret",
        machines=(Machine.VM,),
        forced=TRUE,
    ),
    Rule(
        "persistence",
        Kind.BOOT_UNIT,
        PERSISTENCE_UNIT,
        "enabled",
        "without it the driver gives up its state whenever no process uses a card",
    ),
    Rule(
        "time-sync",
        Kind.BOOT_UNIT,
        TIME_UNIT,
        "enabled",
        "the clock is not synchronised, and this is the host's daemon for it: certificates, logs and a benchmark's "
        "times depend on it",
        where={"clock_lost": TRUE},
    ),
    Rule(
        "acs",
        Kind.BOOT_UNIT,
        ACS_UNIT,
        "enabled",
        _acs_reason,
        where=PEERS,
        machines=METAL,
        kept=_acs_kept,
        gain="50 -> 103 GB/s between two cards of one switch; prefill 30 to 40 % on one host",
    ),
    Rule(
        "governor",
        Kind.GOVERNOR,
        "cpu",
        "performance",
        "the launch path of every decode step runs on the CPU. NVIDIA asks for it on its own CPU hosts; no figure was "
        "published",
        where={"governed": TRUE},
        machines=METAL,
    ),
    Rule(
        "swappiness",
        Kind.SYSCTL,
        "vm.swappiness",
        "0",
        "is to keep an engine's memory in RAM; what NCCL pins stays there anyhow. No figure was published",
    ),
    Rule(
        "numa-balancing",
        Kind.SYSCTL,
        "kernel.numa_balancing",
        "0",
        "the kernel unmaps pages of the engine's threads to find out who uses them, and each touch is then a fault",
        where={"numa_nodes": SEVERAL},
    ),
    Rule(
        "migration-cost",
        Kind.SYSCTL,
        "kernel.sched_migration_cost_ns",
        "50000",
        "in debugfs and no sysctl any more; no figure was published for it",
    ),
    *(
        Rule(
            "limits",
            Kind.LIMIT,
            name,
            value,
            "as in every published launch; NCCL pins memory and opens files by rank and channel",
        )
        for name, value in (("LimitMEMLOCK", "infinity"), ("LimitNOFILE", "1048576"), ("LimitSTACK", "67108864"))
    ),
    Rule(
        "nvme-scheduler",
        Kind.DISK_SCHEDULER,
        "nvme",
        "none",
        "the kernel's own default for NVMe, which Red Hat asks to keep. The wiki measured it against BFQ; a fork of it "
        "chose BFQ for fairness between users, which a host that only loads weights has no need of",
        where={"nvme": TRUE},
        gain="48,600 -> 91,800 random reads a second",
    ),
    Rule("power-limit", Kind.POWER_LIMIT, "watts", None, _power_reason, applies=False),
)

# --- Peer-to-peer: how the cards of a configuration reach each other -------------------------------------------------


def _refused(s: Situation) -> str:
    return f"the driver says {s.p2p_refused} to P2P between these cards; NCCL goes through host memory"


def _level_reason(s: Situation) -> str:
    where = "one NUMA node"
    if s.crosses_numa:
        nodes = "several NUMA nodes" if s.numa_nodes > 1 else "ports that nvidia-smi calls SYS"
        where = "NUMA nodes of several sockets" if s.sockets > 1 else f"{nodes} of one socket"
    return (
        f"the cards are on {where}; by default NCCL takes shared memory between cards that share no switch. A level "
        "too high for the host dead-locks (cards at 100 %, about 140 W, memory not growing)"
    )


def _p2p_off(name: str, condition: P2P, reason: Text) -> Rule:
    return Rule(name, Kind.ENVIRONMENT, "NCCL_P2P_DISABLE", "1", reason, where={"p2p": (condition,), "ranks": SEVERAL})


PEER_TO_PEER = (
    _p2p_off("p2p-off-driver", P2P.REFUSED, _refused),
    _p2p_off(
        "p2p-off-desktop",
        P2P.DESKTOP,
        "on Intel desktop CPUs the first all-reduce over P2P hangs although the driver says OK to it",
    ),
    _p2p_off(
        "p2p-off-iommu",
        P2P.TRANSLATED,
        "the IOMMU translates, and stays so: NCCL's P2P traffic between root ports then hangs. NCCL goes through host "
        "memory",
    ),
    Rule(
        "many-users",
        Kind.ENVIRONMENT,
        "NCCL_P2P_DISABLE",
        "1",
        "the other way round, for many users at once: with NCCL_MIN_NCHANNELS=16, NCCL_MAX_NCHANNELS=32, "
        "NCCL_BUFFSIZE=33554432 and CUDA_DEVICE_MAX_CONNECTIONS=32 traffic goes through memory. It costs the single "
        "user (Kimi-K2.5: 44 against 65 tok/s) and is an override away",
        where={"p2p": (P2P.USABLE, P2P.LEFT), "ranks": SEVERAL},
        applies=False,
    ),
    Rule(
        "p2p-level",
        Kind.ENVIRONMENT,
        "NCCL_P2P_LEVEL",
        lambda s: "SYS" if s.crosses_numa else "PHB",
        _level_reason,
        where={"p2p": (P2P.USABLE,), "ranks": SEVERAL},
        machines=METAL,
        gain="all-reduce of 32 MB on 4 cards 30.3 -> 39.3 GB/s",
    ),
    Rule(
        "p2p-level-vm",
        Kind.ENVIRONMENT,
        "NCCL_P2P_LEVEL",
        None,
        "in a virtual machine the path between two cards is the hypervisor's secret: left to NCCL",
        where={"p2p": (P2P.USABLE,), "ranks": SEVERAL},
        machines=(Machine.VM,),
        applies=False,
    ),
)

# --- NCCL and the engines --------------------------------------------------------------------------------------------

TURIN_DIRECT: Where = {
    "p2p": (P2P.USABLE,),
    "generation": ("turin",),
    "links": DIRECT,
    "sockets": SEVERAL,
    "crosses_numa": TRUE,
    "ranks": SEVERAL,
}
STOCK_NCCL = Versions(below="2.29")
COLLAPSE: Where = {
    "p2p": (P2P.USABLE,),
    "vendor": AMD,
    "links": SWITCHED,
    "switches": range(3, 100),
    "ranks": FOUR,
}


def _graph_given(s: Situation) -> str | None:
    given = s.variable("NCCL_GRAPH_FILE")
    return "the operator's graph file is the finer remedy" if given else None


def _newer_reason(s: Situation) -> str:
    which = f"NCCL {s.nccl}" if s.nccl else "an NCCL that is not known"
    return (
        f"reported for stock NCCL up to 2.28; for {which} no figure is published. With a patched NCCL 2.30 it was "
        "slower at 32 streams (998 tok/s against 1,128 with LL,LL128,Simple)"
    )


NETWORK = "concerns network connections, of which a single host has none"

ENGINE = (
    Rule(
        "device-order",
        Kind.ENVIRONMENT,
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID",
        "a catalogue entry's card numbers then mean the same as nvidia-smi's",
    ),
    Rule(
        "omp-threads",
        Kind.ENVIRONMENT,
        "OMP_NUM_THREADS",
        "8",
        "vLLM itself gives each rank one thread where nothing is said; that 8 is better was never measured",
    ),
    Rule(
        "spawn",
        Kind.ENVIRONMENT,
        "VLLM_WORKER_MULTIPROC_METHOD",
        "spawn",
        "a forked worker inherits a CUDA context it cannot use",
        engines=("vllm",),
    ),
    Rule(
        "deep-gemm",
        Kind.ENVIRONMENT,
        "SGLANG_ENABLE_JIT_DEEPGEMM",
        "0",
        "DeepGEMM has kernels for compute capability 9 and 10 only and fails to import on 12; the other spellings that "
        "are passed around have no reader",
        where={"sm120": TRUE},
        engines=("sglang",),
    ),
    Rule(
        "cpu-affinity",
        Kind.ENVIRONMENT,
        "SGLANG_SET_CPU_AFFINITY",
        "1",
        "no figure was published",
        engines=("sglang",),
    ),
    Rule("fast-safetensors", Kind.ENVIRONMENT, "SAFETENSORS_FAST_GPU", "1", "no figure was published"),
    *(
        Rule(
            "marlin",
            Kind.ENVIRONMENT,
            name,
            None,
            "models/kimi-k25.md sets it, models/kimi-k26.md calls it obsolete: the newer page is followed",
            engines=("vllm",),
            applies=False,
        )
        for name in ("VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_MARLIN_USE_ATOMIC_ADD", "VLLM_MARLIN_INPUT_DTYPE")
    ),
    Rule(
        "ib-off",
        Kind.ENVIRONMENT,
        "NCCL_IB_DISABLE",
        "1",
        "all ranks are on this host; NCCL need not look for adapters",
        where={"peers": TRUE, "ranks": SEVERAL},
    ),
    Rule(
        "min-channels",
        Kind.ENVIRONMENT,
        "NCCL_MIN_NCHANNELS",
        "8",
        "NCCL starts with 2 channels on PCIe. One reproducer with a graph file gained nothing from it",
        where={"peers": TRUE, "ranks": FOUR},
        gain="all-reduce of 32 MB on 8 cards 22.2 -> 37.6 GB/s with a graph file, 41.1 behind switches",
    ),
    Rule(
        "graph-file",
        Kind.ENVIRONMENT,
        "NCCL_GRAPH_FILE",
        None,
        "a graph file for 8 ranks on EPYC Turin is made for one host, breaks groups of 4 ranks and costs memory (GPU "
        "memory fraction 0.93 at most); name yours in an override. Unset it must be, not empty",
        where={"peers": TRUE, "ranks": SEVERAL},
        applies=False,
        gain="cold prefill of 8k tokens 876 -> 7,478 tok/s with it",
    ),
    Rule(
        "proto-ll",
        Kind.ENVIRONMENT,
        "NCCL_PROTO",
        "LL",
        "NCCL takes every AMD CPU for 16 GB/s (NCCL 2.28) and on two EPYC Turin then chooses 2 channels and the Simple "
        "protocol. For few users: at 32 streams a patched NCCL with LL,LL128,Simple is faster",
        where={**TURIN_DIRECT, "nccl": STOCK_NCCL},
        machines=METAL,
        kept=_graph_given,
        gain="Kimi-K2.5 decode 40 -> 65 to 68 tok/s; all-reduce of 32 KB 48.16 -> 26.20 us with a graph file",
    ),
    Rule(
        "proto-ll-newer",
        Kind.ENVIRONMENT,
        "NCCL_PROTO",
        "LL",
        _newer_reason,
        where={**TURIN_DIRECT, "nccl": Other(STOCK_NCCL)},
        machines=METAL,
        applies=False,
    ),
    Rule(
        "proto-ll-genoa",
        Kind.ENVIRONMENT,
        "NCCL_PROTO",
        "LL",
        "one published host with cards on EPYC Genoa runs with it; no figure was published",
        where={"peers": TRUE, "generation": ("genoa",), "links": DIRECT, "ranks": SEVERAL},
        machines=METAL,
        applies=False,
    ),
    Rule(
        "ring",
        Kind.ENVIRONMENT,
        "NCCL_ALGO",
        "Ring",
        "writes of two or more cards of one switch to cards below two or more other ports of an AMD CPU collapse; a "
        "ring sends those of a switch to one port at a time, trees and all-to-all do not. Seen with Broadcom's "
        "switches and 2 cards each",
        where={**COLLAPSE, "switch_maker": ("broadcom",), "cards_a_switch": SEVERAL},
        machines=METAL,
        gain="37 GB/s against 2.7 where the writes collapse",
    ),
    Rule(
        "ring-many",
        Kind.ENVIRONMENT,
        "NCCL_ALGO",
        "Ring",
        "writes of several cards of one Microchip switch to two or more other ports of an AMD CPU collapsed with 4 "
        "cards a switch, and did not with 2",
        where={**COLLAPSE, "switch_maker": ("microchip",), "cards_a_switch": FOUR},
        machines=METAL,
    ),
    Rule(
        "cumem",
        Kind.ENVIRONMENT,
        "NCCL_CUMEM_ENABLE",
        None,
        "0 cured one hang, 1 another: left to NCCL",
        where={"peers": TRUE, "ranks": SEVERAL},
        applies=False,
    ),
    Rule("gdr-level", Kind.ENVIRONMENT, "NCCL_NET_GDR_LEVEL", "SYS", NETWORK, where={"peers": TRUE, "ranks": SEVERAL}),
    Rule(
        "ll-buffers",
        Kind.ENVIRONMENT,
        "NCCL_ALLOC_P2P_NET_LL_BUFFERS",
        "1",
        NETWORK,
        where={"peers": TRUE, "ranks": SEVERAL},
    ),
    Rule(
        "custom-all-reduce",
        Kind.ENGINE_FLAG,
        "disable-custom-all-reduce",
        "true",
        "both engines switch it off on more than two PCIe cards; said outright, the log holds no warning. The one-shot "
        "PCIe all-reduce that gains 5 to 11 % is in a fork only, and lost 4 to 16 % across sockets",
        where={"peers": TRUE, "ranks": range(3, MANY)},
    ),
    Rule(
        "custom-all-reduce-p2p-off",
        Kind.ENGINE_FLAG,
        "disable-custom-all-reduce",
        "true",
        "for exactly two PCIe cards the engines leave it on, it does not ask NCCL_P2P_DISABLE, and the start hangs "
        "where P2P does not work",
        where={"p2p": (P2P.REFUSED, P2P.DESKTOP, P2P.TRANSLATED, P2P.LEFT), "ranks": (2,)},
    ),
    Rule(
        "attention-vllm",
        Kind.ATTENTION,
        "vllm",
        "TRITON_MLA",
        "the one MLA backend for SM120, and vLLM's own choice there. Not given as a flag: a drafter without MLA would "
        "inherit it and crash",
        where={"sm120": TRUE},
        engines=("vllm",),
    ),
    Rule(
        "attention-sglang",
        Kind.ATTENTION,
        "sglang",
        "triton",
        "SGLang's own choice on SM120, and the only one for an FP8 KV cache (flashinfer then falls to 16 tok/s). With "
        "a BF16 cache flashinfer works too and is what the wiki runs (73 to 90 tok/s); the two were never compared",
        where={"sm120": TRUE},
        engines=("sglang",),
    ),
    _memory("memory-vllm", "vllm.base", lambda s: "0.93" if _graph_given(s) else "0.94", "as published, on 8 cards"),
    _memory("memory-vllm-eagle3", "vllm.eagle3", "0.90", DRAFTER_ROOM),
    _memory(
        "memory-vllm-dcp8",
        "vllm.eagle3-dcp8",
        "0.88",
        "at 0.90 it starts, prints a cache size, passes a port check and dies at the first request",
    ),
    _memory(
        "memory-sglang",
        "sglang.base",
        "0.85",
        "the February run's; the wiki has 0.94 for flashinfer with a BF16 cache and 0.85 for triton with FP8, and what "
        "is outside the fraction holds activations and graphs",
    ),
    _memory("memory-sglang-eagle3", "sglang.eagle3", "0.85", f"{DRAFTER_ROOM}; no figure above it was published"),
)
