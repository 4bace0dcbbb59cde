"""The host as typed facts, parsed from the raw readings of rig/facts/remote_script.py. Pure.

Every reading may be None: "unknown", with its reason under HostFacts.unknown. No parser raises on odd tool
output; only a document that is none at all raises FactsError.
"""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from rig.facts.document import Answer, Checkpoint, Device, FactsDocument, Place
from rigctl.contract.comparison import version_tuple
from rigctl.contract.order import faults

SCHEMA = 1
# systemd-detect-virt exits 1 for "none", dpkg-query when one of many patterns matches nothing.
RUNS = ("active", "activating", "reloading")
"""States of a unit that is at work (systemd's ActiveState)."""
# `journalctl --grep` exits 1 when no line matches.
ANSWER_BY_EXIT_CODE = ("virtualisation", "container", "packages", "xid")


XID = re.compile(r"Xid \((PCI:[0-9A-Fa-f:.]+)\): (\d+)")


class FactsError(Exception):
    """The facts document cannot be used: says why, and what to do."""


@dataclass(frozen=True)
class GpuModel:
    """What a PCI id alone tells of a card, so that a host without a driver is decided as one with it."""

    name: str
    compute_capability: tuple[int, int]
    memory_mib: int
    links: str
    """How its cards reach each other: "pcie" or "nvlink"."""
    power_w: int
    """Its power limit as shipped."""


# Device ids: NVIDIA/open-gpu-kernel-modules README.md (2BB1, 2BB4, 2BB5); the H200's was recorded on one.
# 97,887 MiB is what nvidia-smi prints for all three RTX PRO 6000 Blackwell cards. Watts: the upper end of each card's
# range (local-inference-lab/rtx6kpro hardware/blackwell-power-limit-sweep.md), of the Max-Q its 300 W.
GPU_MODELS: Mapping[str, GpuModel] = {
    "10de:2bb1": GpuModel("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 97887, "pcie", 600),
    "10de:2bb4": GpuModel("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), 97887, "pcie", 300),
    "10de:2bb5": GpuModel("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 97887, "pcie", 600),
    "10de:2335": GpuModel("NVIDIA H200", (9, 0), 143771, "nvlink", 700),
}


@dataclass(frozen=True)
class Gpu:
    """One card. Index is its place in PCI bus order, which is what CUDA_DEVICE_ORDER=PCI_BUS_ID counts by."""

    index: int
    address: str
    pci_id: str
    answers: bool | None
    """nvidia-smi lists it; None where nvidia-smi lists nothing at all."""
    name: str
    compute_capability: tuple[int, int] | None = None
    memory_mib: int | None = None
    bar1_bytes: int | None = None
    """Its largest memory window on the bus."""
    link_gen: int | None = None
    """PCIe generation now; cards at rest lower it, so only a value under load counts against a host."""
    link_gen_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_min_w: float | None = None
    power_max_w: float | None = None
    mig: bool | None = None
    numa_node: int | None = None
    host_bridge: str = ""
    bridges: tuple[str, ...] = ()
    """PCI bridges above it, root port first."""
    bound_to: str | None = None
    """Kernel driver that has the device."""
    ecc_errors: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    aer: Mapping[str, int] = field(default_factory=dict)
    """PCIe errors of the device since boot: "fatal", "nonfatal", "correctable"."""
    clique: bool | None = None
    """A hypervisor says by a PCI capability which cards may reach each other; None where it could not be read."""

    @property
    def taken(self) -> bool:
        """It belongs to another driver: a guest has it, or is to get it."""
        return self.bound_to not in (None, "nvidia", "nouveau")

    @property
    def model(self) -> GpuModel | None:
        """The entry of GPU_MODELS, None for a card we do not know."""
        return GPU_MODELS.get(self.pci_id)

    @property
    def behind_switch(self) -> bool:
        """More than a root port above it: a switch shows as an upstream and a downstream port."""
        return len(self.bridges) > 1


@dataclass(frozen=True)
class Bridge:
    """A PCI bridge above a GPU."""

    address: str
    pci_id: str
    redirects: bool | None
    """ACS sends peer traffic up to the root (ReqRedir or CmpltRedir set); None when it could not be read."""
    link_width: int | None = None
    link_width_max: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    gpu_uuid: str
    pid: int
    memory_mib: int | None
    name: str


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: loaded, on disk, and as its tools see it."""

    version: str | None = None
    """Of the loaded module."""
    open_module: bool | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    hmm_disabled: bool | None = None
    on_disk: str | None = None
    """Version of the module that the next boot loads."""
    signer: str | None = None
    smi_error: str | None = None
    """Why nvidia-smi lists no cards, or not all."""
    library: str | None = None
    """Version of the libraries, where they say that they do not fit the module."""

    @property
    def mismatch(self) -> bool:
        """The loaded module and what lies on disk or in the libraries differ: a reboot is due."""
        on_disk_differs = None not in (self.version, self.on_disk) and self.version != self.on_disk
        return on_disk_differs or "version mismatch" in (self.smi_error or "")


@dataclass(frozen=True)
class Cpu:
    """Processor and its frequency governors."""

    vendor: str | None = None
    family: int | None = None
    model: int | None = None
    name: str | None = None
    sockets: int | None = None
    threads: int | None = None
    governors: tuple[str, ...] = ()

    @property
    def amd(self) -> bool:
        return self.vendor == "AuthenticAMD"

    @property
    def intel(self) -> bool:
        return self.vendor == "GenuineIntel"

    @property
    def turin(self) -> bool:
        """EPYC 9005: family 26, models 00h to 1Fh (Linux arch/x86/kernel/cpu/amd.c, Zen 5)."""
        return (
            self.amd
            and self.family == 26
            and self.model is not None
            and self.model < 0x20
            and "EPYC" in (self.name or "")
        )


@dataclass(frozen=True)
class Disk:
    """A physical disk and the scheduler in use."""

    name: str
    scheduler: str | None
    model: str | None = None


@dataclass(frozen=True)
class DataPath:
    """A path we put data in, or "/" and "/dev/shm"; what is said is of its nearest existing folder."""

    path: str
    exists: bool
    mount: str
    filesystem: str
    source: str
    size: int
    free: int
    """Bytes an unprivileged process may still write."""
    device: int
    disks: tuple[Disk, ...] = ()


@dataclass(frozen=True)
class DiskUse:
    """Something of ours on a disk. place.path is where it really lies, name how it was asked for.

    bytes: on disk, a file of several names counted once; None where not known. used: a process names the path.
    """

    kind: str
    name: str
    place: DataPath
    bytes: int | None = None
    used: bool = False


@dataclass(frozen=True)
class Unit:
    """A systemd unit that exists on the host."""

    active: bool
    enabled: bool


@dataclass(frozen=True)
class HostFacts:
    """Everything the policy, the explanation and the preflight look at."""

    gpus: tuple[Gpu, ...] = ()
    bridges: Mapping[str, Bridge] = field(default_factory=dict)
    relations: tuple[tuple[str, ...], ...] = ()
    """nvidia-smi's words for each pair (PIX, PXB, PHB, NODE, SYS, NV#), in GPU order; the diagonal is "X"."""
    relations_guessed: bool = False
    """They follow from the PCI tree, where no NVLink is seen: nvidia-smi did not answer."""
    p2p: tuple[tuple[str, ...], ...] | None = None
    """The worse of read and write for each pair: "OK" or the driver's refusal (CNS, GNS, TNS, NS, U)."""
    processes: tuple[GpuProcess, ...] | None = None
    driver: Driver = Driver()
    cpu: Cpu = Cpu()
    memory_bytes: int | None = None
    swap: bool | None = None
    numa_nodes: int | None = None
    kernel: str | None = None
    machine: str | None = None
    kernels: Mapping[str, bool] = field(default_factory=dict)
    """Installed kernels, and whether there is an nvidia module for each."""
    command_line: tuple[str, ...] | None = None
    iommu_groups: int | None = None
    iommu_types: tuple[str, ...] = ()
    """Default domain types of the groups: "DMA" and "DMA-FQ" translate, "identity" passes through."""
    virtualisation: str | None = None
    """"none" on bare metal, else what systemd-detect-virt says, or "vm" by the CPU's hypervisor bit."""
    container: str | None = None
    os_id: str | None = None
    os_version: str | None = None
    glibc: tuple[int, ...] | None = None
    paths: Mapping[str, DataPath] = field(default_factory=dict)
    models: Mapping[str, tuple[Mapping[str, Any], int]] = field(default_factory=dict)
    """Config and bytes of weights of the checkpoints that are on the host, by folder."""
    partial: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a staging which has not ended has on disk already, by the checkpoint's folder."""
    environments: tuple[str, ...] = ()
    """Folders of the complete engine environments."""
    disk: tuple[DiskUse, ...] = ()
    toolkits: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Version of nvcc by the folder of its CUDA toolkit."""
    gcc: tuple[int, ...] | None = None
    sysctls: Mapping[str, str | None] = field(default_factory=dict)
    units: Mapping[str, Unit] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    unattended_upgrades: bool | None = None
    upgrade_blacklist: tuple[str, ...] = ()
    ports: tuple[int, ...] | None = None
    secure_boot: bool | None = None
    boot_files: Mapping[str, str] = field(default_factory=dict)
    """Text of the boot loader's and modprobe's configuration files that exist."""
    our_arguments: tuple[str, ...] = ()
    """Kernel arguments that an earlier deploy put into /etc/kernel/cmdline."""
    boot_loader: str | None = None
    """"grub", "systemd-boot", or None where there is neither (a container)."""
    clock_synchronised: bool | None = None
    device_nodes: tuple[str, ...] = ()
    nvidia_uvm_node: bool = False
    preload: tuple[str, ...] = ()
    """Libraries that /etc/ld.so.preload puts into every process."""
    xids: tuple[str, ...] = ()
    """The driver's error reports in the kernel's log of this boot: "Xid 79 (PCI:0000:61:00)"."""
    accepted: tuple[str, ...] = ()
    """Configurations whose engine was accepted on this boot."""
    probes: Mapping[str, str | None] = field(default_factory=dict)
    seconds: float | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def distribution(self) -> str:
        """Such as "ubuntu-24.04"; empty when unknown."""
        return f"{self.os_id}-{self.os_version}" if self.os_id and self.os_version else ""

    @property
    def bare_metal(self) -> bool:
        """Neither in a virtual machine nor in a container, as far as is known."""
        return self.virtualisation in (None, "none") and self.container in (None, "none")

    def parameter(self, module: str, name: str) -> str | None:
        """Live value of a kernel module's option, None when the module is not loaded or does not tell."""
        if module == "nvidia_uvm" and name == "uvm_disable_hmm":
            return None if self.driver.hmm_disabled is None else str(int(self.driver.hmm_disabled))
        return self.driver.parameters.get(name.removeprefix("NVreg_")) if module == "nvidia" else None


def parse_host(document: str) -> HostFacts:
    """The facts in a document of remote_script.py. Raises FactsError when it is none."""
    try:
        raw = from_json(document)
    except ValueError as error:
        raise FactsError(f"the facts script did not answer with JSON ({error}): {document[:200]!r}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise FactsError(f"facts of schema {SCHEMA} are needed, got {str(raw)[:200]!r}")
    try:
        return _Reader(FactsDocument.model_validate(raw)).facts()
    except ValidationError as error:
        wrong = "; ".join([*faults(error, FactsDocument, raw)][:5])
        raise FactsError(f"the facts script's document is not as this version reads it: {wrong}") from None


class _Reader:
    """Turns one document into HostFacts, collecting why things are unknown on the way."""

    def __init__(self, raw: FactsDocument) -> None:
        self.raw = raw
        self.unknown = dict(raw.unknown)

    def file(self, path: str) -> str | None:
        return self.raw.files.get(path)

    def output(self, name: str) -> str | None:
        """What a command printed, None (noted) when it could not be run or failed."""
        answer = self.raw.commands.get(name)
        if answer is None:
            return None
        if answer.rc != 0 and name not in ANSWER_BY_EXIT_CODE:
            self.unknown[f"command:{name}"] = _first_line(answer.err or answer.out) or f"exit code {answer.rc}"
        return None if answer.rc is None else answer.out

    def facts(self) -> HostFacts:
        raw, cpu = self.raw, self.raw.cpu
        gpus, smi_error = self._gpus()
        memory = dict(re.findall(r"^(\w+):\s+(\d{1,15}) kB", self.file("/proc/meminfo") or "", re.M))
        apt = self.output("apt_config") or ""
        os_release = dict(re.findall(r'^(\w+)="?([^"\n]*)', self.file("/etc/os-release") or "", re.M))
        listing, relations = self.output("topology") or "", relations_by_path(gpus)
        told = len(shown := parse_matrix(listing)) == len(gpus)
        if told:
            relations = shown
        return HostFacts(
            gpus=gpus,
            bridges=self._bridges(),
            relations=relations,
            relations_guessed=not told,
            p2p=self._p2p(len(gpus)),
            processes=parse_compute_apps(raw.commands.get("compute_apps", Answer())),
            driver=self._driver(smi_error),
            cpu=Cpu(
                cpu.vendor,
                _int(cpu.family),
                _int(cpu.model),
                cpu.name,
                cpu.sockets or None,
                cpu.count,
                cpu.governors,
            ),
            memory_bytes=int(memory["MemTotal"]) * 1024 if "MemTotal" in memory else None,
            swap=int(memory["SwapTotal"]) > 0 if "SwapTotal" in memory else None,
            numa_nodes=self._numa_nodes(),
            kernel=raw.kernel,
            kernels=raw.kernels,
            machine=raw.machine,
            command_line=parse_command_line(self.file("/proc/cmdline")),
            iommu_groups=raw.iommu.groups,
            iommu_types=raw.iommu.types,
            virtualisation=self._virtualisation(),
            container=self._container(),
            os_id=os_release.get("ID"),
            os_version=os_release.get("VERSION_ID"),
            glibc=version_tuple((raw.glibc or "").removeprefix("glibc ")) or None,
            paths={one.path: _data_path(one) for one in raw.paths},
            models=_models(raw.models),
            partial={one.path: one.partial for one in raw.models if one and one.partial},
            environments=raw.environments,
            disk=tuple(DiskUse(one.kind, one.name, _data_path(one), one.bytes, one.used) for one in raw.disk),
            toolkits={home: parse_nvcc(text) for home, text in raw.toolkits.items()},
            gcc=version_tuple(raw.gcc) or None,
            sysctls=raw.sysctls,
            units=parse_units(self.output("units") or ""),
            packages=parse_packages(self.output("packages") or ""),
            holds=tuple((self.output("apt_holds") or "").split()),
            unattended_upgrades=_unattended(apt),
            upgrade_blacklist=tuple(re.findall(r'^Unattended-Upgrade::Package-Blacklist:: "([^"]+)"', apt, re.M)),
            ports=raw.ports,
            secure_boot=raw.secure_boot,
            boot_files={
                path: text
                for path, text in raw.files.items()
                if text is not None and path.startswith(("/etc/default/", "/etc/kernel/", "/etc/modprobe.d/"))
            },
            our_arguments=parse_command_line(self.file("/var/lib/kimi-rig/kernel-arguments")) or (),
            boot_loader=self._boot_loader(),
            clock_synchronised=_clock(self.output("time_sync") or ""),
            device_nodes=raw.device_nodes,
            nvidia_uvm_node="/dev/nvidia-uvm" in raw.exists,
            preload=tuple((self.file("/etc/ld.so.preload") or "").split()),
            # Not the rest of the line: it names processes, in their own words.
            xids=tuple(f"Xid {code} ({at})" for at, code in XID.findall(self.output("xid") or "")),
            accepted=raw.accepted,
            probes=raw.probes,
            seconds=raw.seconds,
            unknown=self.unknown,
        )

    def _gpus(self) -> tuple[tuple[Gpu, ...], str | None]:
        answer = self.raw.commands.get("gpus", Answer(err="not asked"))
        rows, error = parse_gpu_query(answer.out), None
        more = parse_gpu_query(self.output("health") or "")
        rows = {address: {**more.get(address, {}), **row} for address, row in rows.items()}
        if answer.rc != 0:
            error = _first_line(answer.err) or _error_line(answer.out) or f"exit code {answer.rc}"
            self.unknown["command:gpus"] = error
        elif not rows:
            error = _first_line(answer.out) or "it lists no card"
        gpus = tuple(_gpu(index, one, rows) for index, one in enumerate(one for one in self.raw.pci if one.display))
        if rows and (silent := [gpu.address for gpu in gpus if not (gpu.answers or gpu.taken)]):
            error = error or f"{', '.join(silent)} is on the bus and does not answer"
        return gpus, error

    def _numa_nodes(self) -> int | None:
        path = "/sys/devices/system/node/online"
        text = self.file(path)
        count = count_ranges(text)
        if text is not None and count is None:
            self.unknown[path] = f"{text.strip()[:80]!r} is no list of numbers"
        return count

    def _bridges(self) -> dict[str, Bridge]:
        bridges = {}
        for one in self.raw.pci:
            if one.display:
                continue
            # Control word: bit 2 P2P Request Redirect, bit 3 Completion Redirect (PCI Express Base Spec.).
            redirects = bool(one.acs[1] & 0b1100) if one.acs else False
            bridges[one.address] = Bridge(
                one.address,
                one.pci_id,
                redirects if one.acs_readable else None,
                _int(one.current_link_width),
                _int(one.max_link_width),
            )
        return bridges

    def _p2p(self, count: int) -> tuple[tuple[str, ...], ...] | None:
        read, write = (parse_matrix(self.output(name) or "") for name in ("p2p_read", "p2p_write"))
        if count == 0 or len(read) != count or len(write) != count:
            return None
        return tuple(
            tuple(a if a != "OK" else b for a, b in zip(row, other, strict=True))
            for row, other in zip(read, write, strict=True)
        )

    def _driver(self, smi_error: str | None) -> Driver:
        banner = self.file("/proc/driver/nvidia/version") or ""
        modinfo = dict(re.findall(r"^(\w+):\s+(.*)$", self.output("modinfo") or "", re.M))
        loaded = (self.file("/sys/module/nvidia/version") or "").strip() or None
        is_open = "Open Kernel Module" in banner if banner else None
        if is_open is None and "license" in modinfo:
            is_open = "GPL" in modinfo["license"]
        parameters = self.file("/proc/driver/nvidia/params") or ""
        hmm = (self.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm") or "").strip()
        return Driver(
            version=loaded,
            open_module=is_open,
            parameters={
                name: value.strip().strip('"') for name, value in re.findall(r"^(\w+):(.*)$", parameters, re.M)
            },
            hmm_disabled=hmm in ("Y", "1") if hmm else None,
            on_disk=modinfo.get("version"),
            signer=modinfo.get("signer"),
            smi_error=None if loaded is None and "No such file" in (smi_error or "") else smi_error,
            library=_found(r"NVML library version: ([\d.]+)", self.raw.commands.get("gpus", Answer()).out),
        )

    def _virtualisation(self) -> str | None:
        answer = (self.output("virtualisation") or "").strip()
        if answer and answer != self._container():
            return answer
        if self.raw.cpu.hypervisor:
            return "vm"
        return "none" if answer else None  # in a container systemd-detect-virt names the container, not the machine

    def _container(self) -> str | None:
        answer = (self.output("container") or "").strip()
        if answer:
            return answer
        marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
        return next((name for path, name in marks.items() if path in self.raw.exists), None)

    def _boot_loader(self) -> str | None:
        if "/boot/grub/grub.cfg" in self.raw.exists:
            return "grub"
        entries = ("/boot/loader/entries", "/boot/efi/loader/entries", "/efi/loader/entries")
        return "systemd-boot" if any(path in self.raw.exists for path in entries) else None


def parse_gpu_query(text: str) -> dict[str, dict[str, str | None]]:
    """Rows of `nvidia-smi --query-gpu` in csv,nounits by PCI address; "[N/A]" and the like are None."""
    lines = [line for line in text.splitlines() if line.strip()]
    start = next((at for at, line in enumerate(lines) if line.startswith("index,")), None)
    if start is None:
        return {}
    names = [name.split(" [")[0].strip() for name in lines[start].split(",")]
    rows: dict[str, dict[str, str | None]] = {}
    for line in lines[start + 1 :]:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(names):
            continue  # an error message between the rows
        row = {
            name: None if cell.startswith("[") or cell in ("N/A", "") else cell
            for name, cell in zip(names, cells, strict=True)
        }
        if address := row.get("pci.bus_id"):
            rows[short_address(address)] = row
    return rows


def parse_compute_apps(answer: Answer) -> tuple[GpuProcess, ...] | None:
    """Processes of `--query-compute-apps=gpu_uuid,pid,used_memory,process_name`; None when it failed."""
    lines = [line for line in answer.out.splitlines() if line.strip()]
    if answer.rc != 0 or not lines or not lines[0].startswith("gpu_uuid"):
        return None
    cells = [[cell.strip() for cell in line.split(",", 3)] for line in lines[1:]]
    return tuple(
        GpuProcess(row[0], pid, _int(row[2]), row[3])
        for row in cells
        if len(row) == 4 and (pid := _int(row[1])) is not None
    )


def parse_matrix(text: str) -> tuple[tuple[str, ...], ...]:
    """The GPU rows and columns of `nvidia-smi topo -m` or `topo -p2p`; empty when there is none.

    Driver 580 underlines the header by escape codes; NICs and affinities follow the GPU columns.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and words[1:2] != ["GPU1"]]
    rows = [words for words in rows if not (len(words) > 1 and re.fullmatch(r"GPU\d+|CPU", words[1]))]
    if any(len(words) < len(rows) + 1 for words in rows):
        return ()
    return tuple(tuple(words[1 : len(rows) + 1]) for words in rows)


def relations_by_path(gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
    """What `nvidia-smi topo -m` would say, from the PCI tree alone: for hosts without a driver.

    The words as nvidia-smi's legend defines them. NVLink cannot be seen from here.
    """
    return tuple(tuple("X" if a is b else _relation(a, b) for b in gpus) for a in gpus)


def _relation(a: Gpu, b: Gpu) -> str:
    shared = sum(1 for x, y in zip(a.bridges, b.bridges, strict=False) if x == y)
    if a.host_bridge != b.host_bridge:
        return "NODE" if a.numa_node == b.numa_node else "SYS"
    if shared == 0:
        return "PHB"
    # From the last shared port down: two downstream ports of one switch are PIX, a chain of switches PXB.
    below = max(len(a.bridges), len(b.bridges)) - shared
    return "PIX" if below <= 1 else "PXB"


def parse_command_line(text: str | None) -> tuple[str, ...] | None:
    """Tokens of a kernel command line; what follows "--" goes to init and is left out."""
    if text is None:
        return None
    tokens = re.findall(r'(?:[^\s"]|"[^"]*")+', text)
    return tuple(tokens[: tokens.index("--")] if "--" in tokens else tokens)


def parse_units(text: str) -> dict[str, Unit]:
    """Existing units of `systemctl show -p Id,LoadState,ActiveState,UnitFileState`."""
    return {
        name: Unit(shown.get("ActiveState") in RUNS, shown.get("UnitFileState", "").startswith("enabled"))
        for name, shown in unit_properties(text).items()
        if shown.get("LoadState") == "loaded"
    }


def unit_properties(text: str) -> dict[str, dict[str, str]]:
    """Unit -> property -> value of `systemctl show`: one block a unit, with its Id."""
    blocks = (dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n"))
    return {shown.get("Id", ""): shown for shown in blocks if shown}


def parse_packages(text: str) -> dict[str, str]:
    """Installed packages of `dpkg-query -W` with name, version, status."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3 and row[2][1:2] == "i"}


def parse_nvcc(text: str) -> tuple[int, ...] | None:
    """(13, 0, 88) from the "release 13.0, V13.0.88" of `nvcc --version`."""
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text) or re.search(r"release (\d+\.\d+)", text)
    return version_tuple(found[1]) if found else None


def count_ranges(text: str | None) -> int | None:
    """How many numbers a kernel list such as "0-3,8" names; None where it is no such list."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", (text or "").strip()):
        return None
    bounds = (part.split("-") for part in (text or "").strip().split(","))
    return sum(int(part[-1]) - int(part[0]) + 1 for part in bounds)


def short_address(address: str) -> str:
    """sysfs' form of a PCI address: nvidia-smi prints eight digits of domain, sysfs four, in lower case."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _gpu(index: int, device: Device, rows: Mapping[str, Mapping[str, str | None]]) -> Gpu:
    row = rows.get(device.address, {})
    model = GPU_MODELS.get(device.pci_id)
    capability = version_tuple(row.get("compute_cap"))
    node = _int(device.numa_node)
    return Gpu(
        index=index,
        address=device.address,
        pci_id=device.pci_id,
        answers=device.address in rows if rows else None,
        name=row.get("name") or (model.name if model else f"NVIDIA card {device.pci_id}"),
        compute_capability=(capability[0], capability[1])
        if capability and len(capability) == 2
        else model.compute_capability
        if model
        else None,
        memory_mib=_int(row.get("memory.total")) or (model.memory_mib if model else None),
        bar1_bytes=max(device.bars, default=0) or None,
        link_gen=_int(row.get("pcie.link.gen.current")) or link_generation(device.current_link_speed),
        link_gen_max=_least(link_generation(device.max_link_speed), _int(row.get("pcie.link.gen.max"))),
        link_width=_int(row.get("pcie.link.width.current")) or _int(device.current_link_width),
        link_width_max=_int(row.get("pcie.link.width.max")) or _int(device.max_link_width),
        power_limit_w=_float(row.get("power.limit")),
        power_default_w=_float(row.get("power.default_limit")),
        power_min_w=_float(row.get("power.min_limit")),
        power_max_w=_float(row.get("power.max_limit")),
        mig={"enabled": True, "disabled": False}.get((row.get("mig.mode.current") or "").lower()),
        numa_node=None if node is None or node < 0 else node,
        host_bridge=device.path[0] if device.path else "",
        bridges=device.path[1:],
        bound_to=device.driver,
        ecc_errors=_int(row.get("ecc.errors.uncorrected.volatile.total")),
        aer=device.aer,
        clique=device.clique,
    )


def link_generation(speed: str | None) -> int | None:
    """PCIe generation of sysfs' link speed ("32.0 GT/s PCIe")."""
    rates = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
    return rates.get((speed or "").split(" ")[0])


def _data_path(one: Place) -> DataPath:
    disks = []
    for disk in one.disks:
        words = (disk.scheduler or "").split()
        current = next((word.strip("[]") for word in words if word.startswith("[")), words[0] if words else None)
        disks.append(Disk(disk.name, current, disk.model))
    place = (one.path, one.exists, one.mount, one.type, one.source, one.size, one.free, one.device)
    return DataPath(*place, tuple(disks))


def _models(found: Sequence[Checkpoint | None]) -> dict[str, tuple[Mapping[str, Any], int]]:
    models: dict[str, tuple[Mapping[str, Any], int]] = {}
    for one in found:
        if one and one.config and one.bytes:
            with contextlib.suppress(ValueError):
                config = from_json(one.config)
                if isinstance(config, dict):
                    models[one.path] = (config, one.bytes)
    return models


def _unattended(apt: str) -> bool | None:
    values: dict[str, str] = dict(re.findall(r'^APT::Periodic::(Enable|Unattended-Upgrade) "([^"]*)"', apt, re.M))
    if not values:
        return None
    return values.get("Enable", "1") != "0" and values.get("Unattended-Upgrade", "0") != "0"


def _clock(text: str) -> bool | None:
    found = re.search(r"^NTPSynchronized=(yes|no)$", text, re.M)
    return None if found is None else found[1] == "yes"


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _int(text: str | None) -> int | None:
    number = _float(text)
    return None if number is None or not math.isfinite(number) else int(number)


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _error_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if re.search(r"error|unable|lost|fail", line, re.I)), "")
