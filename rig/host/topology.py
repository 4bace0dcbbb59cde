"""Topology policy: a host's facts in, its settings out, each with reason, source and confidence. Pure.

Decode at 40 or 68 tok/s, prefill at 876 or 7,478, or a silent dead-lock come from settings that are right on one
topology and harmful on the next, and the sources contradict each other. The rules here:

* a setting applies to the topology it was reported for, and to no other;
* one that rests on a single report is explained and not applied;
* what is unknown is left alone;
* where sources disagree, both are named in the reason;
* the operator's override wins, and is shown as one.

Sources are named as repo path or repo#thread. Daily summaries of rtx6kpro are chat digests: one of them is one report.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rig.facts.host import Gpu, HostFacts
from rig.host.settings import (
    ACS_UNIT,
    PERSISTENCE_UNIT,
    TIME_UNIT,
    Confidence,
    HostSettings,
    Kind,
    Setting,
    host_settings,
)

WIKI = "local-inference-lab/rtx6kpro"
TUNING = f"{WIKI} optimization/nccl-tuning.md"
ESC8000A = f"{WIKI} hardware/asus-esc8000a-e13p-broadcom-switches.md"
NCCL_GUIDE = "NVIDIA NCCL user guide"
COMPOSE = f"{WIKI} compose files"
ISSUES = f"{WIKI} troubleshooting/common-issues.md"
FLAPPING = "Visual-Synthesizer/rtx6kpro troubleshooting/pcie-link-speed-flapping-cpayne.md"
GRACE_GUIDE = "NVIDIA Grace CPU benchmarking guide, platform configuration"

FORCE_P2P = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"

REFUSED_ATTENTION: Mapping[str, Mapping[str, str]] = {
    "sglang": dict.fromkeys(
        ("trtllm_mla", "cutlass_mla", "flashmla", "fa3"),
        "has no SM120 kernels (sgl-project/sglang#24633, sgl-project/sglang#17880)",
    ),
    "vllm": dict.fromkeys(
        ("CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA"),
        "is for compute capability 9 or 10 (vllm-project/vllm vllm/v1/attention/backends/mla)",
    ),
}
"""Attention backends that cannot run on SM120, with why: a configuration that names one is refused."""


_variable = partial(Setting, Kind.ENVIRONMENT)


class TopologyError(Exception):
    """An override that is none: says which, and what there is."""


@dataclass(frozen=True)
class Decision:
    """All settings of a host, applied or only explained, and the cards they are for."""

    settings: tuple[Setting, ...]
    cards: tuple[Gpu, ...]
    left_out: tuple[Gpu, ...]
    """Cards that serve no configuration: of another kind than most, or silent."""

    @property
    def host(self) -> HostSettings:
        """The applied settings, as units and system take them over."""
        return host_settings(self.settings, tuple(card.index for card in self.cards))

    def find(self, key: str) -> Setting | None:
        """The setting of that name ("kernel_argument.iommu"), None when the policy says nothing of it."""
        return next((one for one in self.settings if one.key == key), None)


def decide(facts: HostFacts, overrides: Mapping[str, str | None] | None = None) -> Decision:
    """Settings for a host. overrides: "kind.name" -> value, or None to leave that setting alone.

    Raises TopologyError for an override of an unknown kind, and for a power limit that is no number.
    """
    wanted = dict(overrides or {})
    view = _View(facts, wanted)
    settings = [replace(one, applied=False) if one.confidence is Confidence.SINGLE else one for one in _policy(view)]
    return Decision(tuple(_overridden(settings, wanted)), view.cards, view.left_out)


class _View:
    """What the rules ask of the facts."""

    def __init__(self, facts: HostFacts, overrides: Mapping[str, str | None]) -> None:
        self.facts = facts
        self.overrides = overrides

    @cached_property
    def cards(self) -> tuple[Gpu, ...]:
        """The largest set of equal cards that answer; of two as large, the one first on the bus."""
        alive = [gpu for gpu in self.facts.gpus if gpu.answers is not False]
        if not alive:
            return ()
        kind = Counter(gpu.pci_id for gpu in alive).most_common(1)[0][0]
        return tuple(gpu for gpu in alive if gpu.pci_id == kind)

    @property
    def left_out(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.facts.gpus if gpu not in self.cards)

    @cached_property
    def pairs(self) -> frozenset[str]:
        """Kinds of path between the chosen cards."""
        chosen = [card.index for card in self.cards]
        rows = self.facts.relations
        return frozenset(rows[a][b] for a in chosen for b in chosen if a != b and len(rows) > max(a, b))

    @property
    def sm120(self) -> bool:
        return bool(self.cards) and self.cards[0].compute_capability == (12, 0)

    @property
    def nvlink(self) -> bool:
        model = self.cards[0].model if self.cards else None
        return bool(model and model.links == "nvlink") or any(pair.startswith("NV") for pair in self.pairs)

    @property
    def peers(self) -> bool:
        """Several cards that can reach each other over PCIe alone."""
        return len(self.cards) > 1 and not self.nvlink

    @property
    def metal_peers(self) -> bool:
        return self.peers and self.facts.bare_metal

    @property
    def switched(self) -> bool:
        return bool(self.pairs & {"PIX", "PXB"}) or any(card.behind_switch for card in self.cards)

    @property
    def crosses_numa(self) -> bool:
        """Cards on several NUMA nodes; where the nodes are not told, several sockets count."""
        if "SYS" in self.pairs:
            return True
        told = {card.numa_node for card in self.cards}
        return None in told and (self.facts.cpu.sockets or 1) > 1

    @property
    def p2p_refused(self) -> str | None:
        """The driver's word for a pair of chosen cards that may not use P2P; None when all may, or nothing is known."""
        chosen = [card.index for card in self.cards]
        rows = self.facts.p2p or ()
        words = {rows[a][b] for a in chosen for b in chosen if a != b and len(rows) > max(a, b)}
        return next(iter(sorted(words - {"OK"})), None)

    def live(self, token: str) -> bool:
        return token in (self.facts.command_line or ())

    def operator(self, kind: Kind, name: str) -> str | None:
        return self.overrides.get(f"{kind}.{name}")


def _policy(view: _View) -> Iterator[Setting]:
    if not view.cards:
        return
    yield from _iommu(view)
    yield from _power_states(view)
    yield from _modules(view)
    yield from _boot_units(view)
    yield from _system(view)
    yield from _limits_and_disks(view)
    yield from _power_limit(view)
    yield from _environment(view)
    yield from _nccl(view)
    yield from _engines(view)
    yield from _memory(view)


def _iommu(view: _View) -> Iterator[Setting]:
    cpu = view.facts.cpu
    if not view.metal_peers or not (cpu.amd or cpu.intel):
        return
    names = ("iommu", "amd_iommu") if cpu.amd else ("intel_iommu",)
    source = f"{TUNING}; vllm-project/vllm#33041; NVIDIA/nccl#1999"
    confidence = Confidence.DOCUMENTED
    if cpu.intel:
        source = f"{NCCL_GUIDE}, troubleshooting; {WIKI} daily-summaries 2026-06-02"
    reason = "an IOMMU that translates makes NCCL's P2P traffic between root ports hang"
    applied = True
    if view.live("iommu=pt") and not any(view.live(f"{name}=off") for name in names):
        applied = False
        reason += (
            "; this host was booted with iommu=pt, which others report to work as well "
            f"({WIKI} daily-summaries 2026-02-17, 06-18, 06-30; gardenlinux/gardenlinux#4556): kept as it is"
        )
    elif view.facts.iommu_groups == 0 and not any(view.live(f"{name}=off") for name in names):
        applied = False
        reason += "; none is at work on this host (no IOMMU groups), so nothing needs to be switched off"
    elif (cpu.threads or 0) > 255:
        reason += f"; check after the reboot that all {cpu.threads} CPUs are online (x2APIC needs interrupt remapping)"
    follows = view.operator(Kind.KERNEL_ARGUMENT, "iommu") not in (None, "off")
    for name in names:
        if follows and name != "iommu":
            applied, reason = False, f"the operator's iommu argument is followed; the policy: {reason}"
        yield Setting(Kind.KERNEL_ARGUMENT, name, "off", reason, source, confidence, applied)


def _power_states(view: _View) -> Iterator[Setting]:
    if not view.metal_peers:
        return
    source = f"{ISSUES}; {FLAPPING}; {WIKI} daily-summaries 2026-06-02"
    reason = "link power states on the way to a card end in Surprise Link Down (AER uncorrectable status 0x20)"
    for name in ("pcie_aspm", "pcie_port_pm"):
        yield Setting(Kind.KERNEL_ARGUMENT, name, "off", reason, source, Confidence.MEASURED)
    for name, value, why, where in (
        ("processor.max_cstate", "1", "one user's choice, without figures", "daily-summaries 2026-04-15"),
        ("mitigations", "off", "one reference host; gives up security and is not needed for P2P", "models/kimi-k25.md"),
        (
            "pcie_acs_override",
            "downstream,multifunction",
            f"works on a patched kernel only; {ACS_UNIT} does the same at run time",
            "hardware/topology.md",
        ),
    ):
        yield Setting(Kind.KERNEL_ARGUMENT, name, value, why, f"{WIKI} {where}", Confidence.SINGLE)


def _modules(view: _View) -> Iterator[Setting]:
    if not view.peers:
        return
    yield Setting(
        Kind.MODULE_OPTION,
        "nvidia_uvm.uvm_disable_hmm",
        "1",
        "with heterogeneous memory management on, NCCL's P2P operations lock up on hosts with several cards",
        f"{TUNING}; {ISSUES}; level1techs.com thread 242403",
        Confidence.MEASURED,
    )
    if not view.facts.bare_metal:
        return
    yield Setting(
        Kind.MODULE_OPTION,
        "nvidia.NVreg_DynamicPowerManagement",
        "0x00",
        "cards that go to sleep let their links flap (1,415 transitions in 2 minutes at idle on one host)",
        f"{ISSUES}; {FLAPPING}",
        Confidence.MEASURED,
    )
    yield _force_p2p(view)


def _force_p2p(view: _View) -> Setting:
    source = f"{WIKI} optimization/pcie-oneshot-allreduce.md; {WIKI} hardware/pcie-bandwidth.md"
    name = "nvidia.NVreg_RegistryDwords"
    if view.switched:
        reason = (
            "for cards that hang on the CPU directly; behind a switch it is not needed, and one host gained "
            "30 to 50 % by removing it and clearing ACS"
        )
        source += f"; {WIKI} daily-summaries 2026-07-04"
        return Setting(Kind.MODULE_OPTION, name, FORCE_P2P, reason, source, Confidence.SINGLE)
    version = view.facts.driver.version or view.facts.driver.on_disk
    if version is not None and version.split(".")[0] == "580":
        reason = (
            "needed on cards that hang on the CPU directly, but on driver 580 one host's peer copies then failed "
            "with 'invalid device ordinal': left alone on that driver"
        )
        return Setting(Kind.MODULE_OPTION, name, FORCE_P2P, reason, source, Confidence.SINGLE)
    return Setting(
        Kind.MODULE_OPTION,
        name,
        FORCE_P2P,
        "cards that hang on the CPU directly map each other's memory through system memory unless forced, and a custom "
        "all-reduce then runs at a fifteenth of NCCL's speed or switches itself off; NCCL itself is not affected",
        source,
        Confidence.MEASURED,
        expected_gain="decode 60 -> 100 tok/s on 4 cards with a custom all-reduce; none with NCCL alone",
    )


def _boot_units(view: _View) -> Iterator[Setting]:
    if view.facts.container not in (None, "none"):
        return
    yield Setting(
        Kind.BOOT_UNIT,
        PERSISTENCE_UNIT,
        "enabled",
        "without it the driver gives up its state whenever no process uses a card",
        "NVIDIA driver README, nvidia-persistenced",
        Confidence.DOCUMENTED,
    )
    if view.facts.clock_synchronised is False and TIME_UNIT in view.facts.units:
        yield Setting(
            Kind.BOOT_UNIT,
            TIME_UNIT,
            "enabled",
            "the clock is not synchronised, and this is the host's daemon for it: certificates, logs and a benchmark's "
            "times depend on it",
            "systemd/systemd man/systemd-timesyncd.service.xml",
            Confidence.DOCUMENTED,
        )
    if not view.metal_peers:
        return
    redirecting = [bridge.address for bridge in view.facts.bridges.values() if bridge.redirects]
    found = f" (now set on {len(redirecting)} of {len(view.facts.bridges)} bridges)" if view.facts.bridges else ""
    yield Setting(
        Kind.BOOT_UNIT,
        ACS_UNIT,
        "enabled",
        f"ACS request and completion redirect send traffic between cards up to the root port{found}; the firmware sets "
        "them anew at every boot. Only those two bits are cleared, and only on the bridges above the cards: the wiki "
        "writes 0x0011 or 0x0000 to every device, NVIDIA's guide warns against one value for all",
        f"NVIDIA/nccl#2079; {ESC8000A}; {NCCL_GUIDE}, troubleshooting",
        Confidence.DOCUMENTED,
        expected_gain="50 -> 103 GB/s between two cards of one switch; prefill 30 to 40 % on one host",
    )


def _system(view: _View) -> Iterator[Setting]:
    facts = view.facts
    if facts.bare_metal and facts.cpu.governors:
        yield Setting(
            Kind.GOVERNOR,
            "cpu",
            "performance",
            "the launch path of every decode step runs on the CPU. NVIDIA asks for it on its own CPU hosts; no figure "
            "was published",
            f"{TUNING}; {GRACE_GUIDE}",
            Confidence.DOCUMENTED,
        )
    if facts.container not in (None, "none"):
        return
    yield Setting(
        Kind.SYSCTL,
        "vm.swappiness",
        "0",
        "is to keep an engine's memory in RAM; what NCCL pins stays there anyhow. No figure was published",
        TUNING,
        Confidence.SINGLE,
    )
    if (facts.numa_nodes or 1) > 1:
        yield Setting(
            Kind.SYSCTL,
            "kernel.numa_balancing",
            "0",
            "the kernel unmaps pages of the engine's threads to find out who uses them, and each touch is then a fault",
            f"{TUNING}; huggingface/text-generation-inference#1874; {GRACE_GUIDE}",
            Confidence.DOCUMENTED,
        )
    yield Setting(
        Kind.SYSCTL,
        "kernel.sched_migration_cost_ns",
        "50000",
        "no sysctl since Linux 5.13, where it moved to debugfs; no figure was published for it",
        TUNING,
        Confidence.SINGLE,
    )


def _limits_and_disks(view: _View) -> Iterator[Setting]:
    for name, value in (("LimitMEMLOCK", "infinity"), ("LimitNOFILE", "1048576"), ("LimitSTACK", "67108864")):
        reason = "as in every published launch; NCCL pins memory and opens files by rank and channel"
        yield Setting(Kind.LIMIT, name, value, reason, COMPOSE, Confidence.MEASURED)
    disks = [disk for path in view.facts.paths.values() for disk in path.disks]
    if view.facts.container in (None, "none") and any(disk.name.startswith("nvme") for disk in disks):
        yield Setting(
            Kind.DISK_SCHEDULER,
            "nvme",
            "none",
            "the kernel's own default for NVMe, which Red Hat asks to keep. The wiki measured it against BFQ; a fork "
            "of it chose BFQ for fairness between users, which a host that only loads weights has no need of",
            f"{WIKI} hardware/nvme-raid-io-optimization.md; Red Hat Enterprise Linux 9, The default disk scheduler; "
            "contradicted by sjug/rtx6kpro optimization/io-tuning.md",
            Confidence.DOCUMENTED,
            expected_gain="48,600 -> 91,800 random reads a second",
        )


def _power_limit(view: _View) -> Iterator[Setting]:
    ranges = [(card.power_min_w, card.power_max_w) for card in view.cards]
    low = max((low for low, _ in ranges if low is not None), default=None)
    high = min((high for _, high in ranges if high is not None), default=None)
    known = f"the cards allow {low:g} to {high:g} W" if low is not None and high is not None else "the range is unknown"
    yield Setting(
        Kind.POWER_LIMIT,
        "watts",
        None,
        f"never changed unasked; {known}. 300 W cost 4 % for one user and 30 % at 64; 500 W is about 600 W. Limiting "
        "caused dropouts on one host and cured bus drops on another",
        f"{WIKI} hardware/blackwell-power-limit-sweep.md, daily-summaries 06-22, 07-30",
        Confidence.MEASURED,
        applied=False,
    )


def _environment(view: _View) -> Iterator[Setting]:
    yield _variable(
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID",
        "a catalogue entry's card numbers then mean the same as nvidia-smi's",
        "NVIDIA CUDA programming guide, environment variables",
        Confidence.DOCUMENTED,
    )
    yield _variable(
        "OMP_NUM_THREADS",
        "8",
        "vLLM itself gives each rank one thread where nothing is said (vllm/v1/executor/multiproc_executor.py); that 8 "
        "is better was never measured",
        TUNING,
        Confidence.SINGLE,
    )
    yield _variable(
        "VLLM_WORKER_MULTIPROC_METHOD",
        "spawn",
        "a forked worker inherits a CUDA context it cannot use",
        f"vllm-project/vllm#6152; vllm-project/vllm docs/design/multiprocessing.md; {TUNING}",
        Confidence.DOCUMENTED,
        engines=("vllm",),
    )
    if view.sm120:
        yield _variable(
            "SGLANG_ENABLE_JIT_DEEPGEMM",
            "0",
            "DeepGEMM has kernels for compute capability 9 and 10 only and fails to import on 12; the other spellings "
            "that are passed around have no reader",
            f"deepseek-ai/DeepGEMM README.md; {ISSUES}; kvcache-ai/sglang python/sglang/srt/environ.py",
            Confidence.DOCUMENTED,
            engines=("sglang",),
        )
    yield _variable(
        "SGLANG_SET_CPU_AFFINITY", "1", "no figure published", TUNING, Confidence.SINGLE, engines=("sglang",)
    )
    yield _variable("SAFETENSORS_FAST_GPU", "1", "no figure published", TUNING, Confidence.SINGLE)
    for name in ("VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_MARLIN_USE_ATOMIC_ADD", "VLLM_MARLIN_INPUT_DTYPE"):
        yield _variable(
            name,
            None,
            "models/kimi-k25.md sets it, models/kimi-k26.md calls it obsolete: the newer page is followed",
            f"{WIKI} models/kimi-k26.md",
            Confidence.SINGLE,
            engines=("vllm",),
        )


def _nccl(view: _View) -> Iterator[Setting]:
    if not view.peers:
        return
    yield _variable(
        "NCCL_IB_DISABLE",
        "1",
        "all ranks are on this host; NCCL need not look for adapters",
        f"{NCCL_GUIDE}, environment variables; {COMPOSE}",
        Confidence.DOCUMENTED,
    )
    yield from _p2p_level(view)
    if len(view.cards) >= 4:
        yield _variable(
            "NCCL_MIN_NCHANNELS",
            "8",
            "NCCL starts with 2 channels on PCIe. One reproducer with a graph file gained nothing from it",
            f"{TUNING}; {ESC8000A}",
            Confidence.DOCUMENTED,
            expected_gain="all-reduce of 32 MB on 8 cards 22.2 -> 37.6 GB/s with a graph file, 41.1 behind switches",
        )
    yield from _protocol(view)
    yield _variable(
        "NCCL_CUMEM_ENABLE",
        None,
        "0 cured one hang, 1 another: left to NCCL",
        f"{WIKI}#21; gardenlinux/gardenlinux#4556",
        Confidence.SINGLE,
    )
    for name in ("NCCL_NET_GDR_LEVEL", "NCCL_ALLOC_P2P_NET_LL_BUFFERS"):
        reason = "concerns network connections, of which a single host has none"
        yield _variable(name, "SYS" if "GDR" in name else "1", reason, TUNING, Confidence.SINGLE)


def _p2p_level(view: _View) -> Iterator[Setting]:
    if (broken := _p2p_broken(view)) is not None:
        yield broken
        return
    yield _variable(
        "NCCL_P2P_DISABLE",
        "1",
        "the other way round, for many users at once: with NCCL_MIN_NCHANNELS=16, NCCL_MAX_NCHANNELS=32, "
        "NCCL_BUFFSIZE=33554432 and CUDA_DEVICE_MAX_CONNECTIONS=32 traffic goes through memory. It costs the single "
        "user (Kimi-K2.5: 44 against 65 tok/s) and is an override away",
        TUNING,
        Confidence.SINGLE,
    )
    if view.operator(Kind.ENVIRONMENT, "NCCL_P2P_DISABLE") == "1":
        return
    if not view.facts.bare_metal:
        yield _variable(
            "NCCL_P2P_LEVEL",
            None,
            "in a virtual machine the path between two cards is the hypervisor's secret: left to NCCL",
            "gardenlinux/gardenlinux#4556",
            Confidence.SINGLE,
        )
        return
    level = "SYS" if view.crosses_numa else "PHB"
    where = "NUMA nodes of several sockets" if level == "SYS" else "one NUMA node"
    yield _variable(
        "NCCL_P2P_LEVEL",
        level,
        f"the cards are on {where}; by default NCCL takes shared memory between cards that share no switch. A level "
        "too high for the host dead-locks (cards at 100 %, about 140 W, memory not growing)",
        f"{TUNING}; {ESC8000A}; {NCCL_GUIDE}, environment variables",
        Confidence.DOCUMENTED,
        expected_gain="all-reduce of 32 MB on 4 cards 30.3 -> 39.3 GB/s",
    )


def _p2p_broken(view: _View) -> Setting | None:
    source = "vllm-project/vllm#33041; NVIDIA/nccl#1999"
    if (refused := view.p2p_refused) is not None:
        reason = f"the driver says {refused} to P2P between these cards; NCCL goes through host memory"
    elif view.facts.cpu.intel and re.search(r"\bCore\b", view.facts.cpu.name or ""):
        reason = "on Intel desktop CPUs the first all-reduce over P2P hangs although the driver says OK to it"
        source = f"{WIKI}#15; {WIKI}#21"
    else:
        return None
    return _variable("NCCL_P2P_DISABLE", "1", reason, source, Confidence.DOCUMENTED)


def _protocol(view: _View) -> Iterator[Setting]:
    turin_direct = view.facts.cpu.turin and view.crosses_numa and not view.switched and view.facts.bare_metal
    graph = view.operator(Kind.ENVIRONMENT, "NCCL_GRAPH_FILE")
    source = f"{TUNING}; NVIDIA/nccl#2127"
    yield _variable(
        "NCCL_GRAPH_FILE",
        None,
        "a graph file for 8 ranks on EPYC Turin is made for one host, breaks groups of 4 ranks and costs memory (GPU "
        "memory fraction 0.93 at most); name yours in an override. Unset it must be, not empty",
        source,
        Confidence.MEASURED,
        expected_gain="cold prefill of 8k tokens 876 -> 7,478 tok/s with it",
    )
    if not turin_direct or graph:
        return
    yield _variable(
        "NCCL_PROTO",
        "LL",
        "NCCL takes every AMD CPU for 16 GB/s (NCCL 2.28) and on two EPYC Turin then chooses 2 channels and the Simple "
        "protocol; a graph file or a patched NCCL is the finer remedy",
        source,
        Confidence.DOCUMENTED,
        expected_gain="Kimi-K2.5 decode 40 -> 65 to 68 tok/s; all-reduce of 32 KB 48.16 -> 26.20 us with a graph file",
    )


def _engines(view: _View) -> Iterator[Setting]:
    if view.peers and len(view.cards) > 2:
        yield Setting(
            Kind.ENGINE_FLAG,
            "disable-custom-all-reduce",
            "true",
            "both engines switch it off on more than two PCIe cards; said outright, the log holds no warning. The "
            "one-shot PCIe all-reduce that gains 5 to 11 % is in a fork only, and lost 4 to 16 % across sockets",
            f"vllm-project/vllm#56128; {WIKI}#15; {WIKI}#21; {WIKI} optimization/pcie-oneshot-allreduce.md",
            Confidence.DOCUMENTED,
        )
    if not view.sm120:
        return
    yield Setting(
        Kind.ATTENTION,
        "vllm",
        "TRITON_MLA",
        "the one MLA backend for SM120, and vLLM's own choice there. Not given as a flag: a drafter without MLA would "
        "inherit it and crash",
        "vllm-project/vllm vllm/platforms/cuda.py; vllm-project/vllm#39126",
        Confidence.DOCUMENTED,
        engines=("vllm",),
    )
    yield Setting(
        Kind.ATTENTION,
        "sglang",
        "triton",
        "SGLang's own choice on SM120, and the only one for an FP8 KV cache (flashinfer then falls to 16 tok/s). With "
        "a BF16 cache flashinfer works too and is what the wiki runs (73 to 90 tok/s); the two were never compared",
        f"sgl-project/sglang#20479; sgl-project/sglang#24633; {WIKI} models/kimi-k25.md",
        Confidence.DOCUMENTED,
        engines=("sglang",),
    )


def _memory(view: _View) -> Iterator[Setting]:
    if not view.sm120 or len(view.cards) < 8:
        return
    graph = bool(view.operator(Kind.ENVIRONMENT, "NCCL_GRAPH_FILE"))
    eagle = "the drafter, its cache and its graphs need room beside the fraction"
    k25, k26 = f"{WIKI} models/kimi-k25.md", f"{WIKI} models/kimi-k26.md, measured again for its versions v1 to v9"
    dcp = "at 0.90 it starts, prints a cache size, passes a port check and dies at the first request"
    for name, value, reason, source in (
        ("vllm.base", "0.93" if graph else "0.94", "as published for Kimi on 8 cards", f"{k25}; {k26}"),
        ("vllm.eagle3", "0.90", eagle, k26),
        ("vllm.eagle3-dcp8", "0.88", dcp, k26),
        (
            "sglang.base",
            "0.85",
            "the February run's; the wiki has 0.94 for flashinfer with a BF16 cache and 0.85 for triton with FP8, and "
            "what is outside the fraction holds activations and graphs",
            f"{k25}; inventory/serving.yaml, as run in February 2026",
        ),
        ("sglang.eagle3", "0.85", f"{eagle}; no figure above it was published", f"{k25}; inventory/serving.yaml"),
    ):
        yield Setting(
            Kind.MEMORY_FRACTION,
            name,
            value,
            reason,
            source,
            Confidence.MEASURED,
            engines=(name.split(".")[0],),
        )


def _overridden(settings: Iterable[Setting], overrides: Mapping[str, str | None]) -> Iterator[Setting]:
    left = dict(overrides)
    for key, value in overrides.items():
        _check_override(key, value)
    for setting in settings:
        if setting.key in left:
            yield _by_operator(setting, left.pop(setting.key))
        else:
            yield setting
    for key, value in left.items():
        kind, _, name = key.partition(".")
        if kind not in Kind.__members__.values() or not name:
            raise TopologyError(
                f"host_overrides: {key!r} is no setting; a key is <kind>.<name>, kinds are {', '.join(Kind)}"
            )
        reason = "set by the operator; the policy says nothing of it on this host"
        yield Setting(Kind(kind), name, value, reason, "host data", Confidence.OPERATOR, applied=value is not None)


def _check_override(key: str, value: str | None) -> None:
    """What no file of the host stage checks: values that go into units and command lines."""
    kind = key.partition(".")[0]
    if value is None:
        return
    if kind == Kind.MEMORY_FRACTION and not re.fullmatch(r"0?\.\d*[1-9]\d*", value):
        raise TopologyError(f"host_overrides: {key} is {value!r}; a share between 0 and 1 is needed")
    if kind in (Kind.LIMIT, Kind.BOOT_UNIT) and not re.fullmatch(r"[\w.:@-]+", f"{key}{value}", re.ASCII):
        raise TopologyError(f"host_overrides: {key!r} is {value!r}; a unit takes letters, digits and .:@_- there")


def _by_operator(setting: Setting, value: str | None) -> Setting:
    policy = (setting.value or "unset") if setting.applied else "left alone"
    if value is None:
        reason = f"left alone by the operator; the policy: {setting.reason}"
        return replace(
            setting, applied=False, reason=reason, source="host data", confidence=Confidence.OPERATOR, replaces=policy
        )
    if setting.kind is Kind.POWER_LIMIT and not value.isdigit():
        raise TopologyError(f"host_overrides: {setting.key} is {value!r}; whole watts are needed")
    reason = f"set by the operator; the policy: {setting.reason}"
    return replace(
        setting,
        value=value,
        applied=True,
        reason=reason,
        source="host data",
        confidence=Confidence.OPERATOR,
        replaces=policy,
    )
