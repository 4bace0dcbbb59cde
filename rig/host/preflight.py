"""Everything that could fail later, found before anything long begins, and all of it at once. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from rig.catalog.entries import Configuration, Release
from rig.facts.host import DataPath, Gpu, HostFacts
from rig.host.cuda_toolkit import BUILD, SERVE
from rig.host.disk import FileSystem
from rig.host.live_settings import reboot_needed, reboot_recommended
from rig.host.memory_fit import Fit
from rig.host.settings import TIME_UNIT, Confidence, Kind, kernel_token
from rig.host.topology import NO_LOADER, REFUSED_ATTENTION, Decision
from rigctl.contract.comparison import key_values, version_tuple

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108
PEERS = 8
"""Peers of a card without NVSwitch (CUDA programming guide, peer-to-peer memory access)."""
CORRECTABLE = 1000
DWORDS = "NVreg_RegistryDwords"
SHM_WANTED = 8 * GIB  # the least of the published launches (local-inference-lab/rtx6kpro compose files: 8 to 32 GB)
RIVALS = (
    "display-manager.service",
    "gdm.service",
    "lightdm.service",
    "sddm.service",
    "ollama.service",
    "vllm.service",
    "sglang.service",
)
EPHEMERAL = re.compile(r"Instance Storage|nvme_card|Virtual Disk.*Temporary", re.I)
"""Disk models whose content a provider does not keep: Amazon's instance store, Google's local SSD."""


class Severity(StrEnum):
    """error: it would fail. warning: it may, or it will be slow. note: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing found: what is wrong and where, and what to do."""

    severity: Severity
    code: str
    message: str
    remedy: str = ""
    card: Gpu | None = None
    """What it is about, until `preflight` puts it into the message: the same of several cards is said once."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}{'; ' + self.remedy if self.remedy else ''} [{self.code}]"


@dataclass(frozen=True)
class Needs:
    """What the deploy will ask of the host."""

    serving: Mapping[str, Configuration] = field(default_factory=dict)
    releases: Mapping[str, Release] = field(default_factory=dict)
    disk: tuple[FileSystem, ...] = ()
    """The account of each file system that something is to be written to."""
    fits: tuple[Fit, ...] = ()
    not_accounted: Mapping[str, str] = field(default_factory=dict)
    """Configurations whose memory cannot be accounted for: name -> what is missing."""
    cuda_home: str | None = None
    """The CUDA toolkit that the operator named."""
    without_nvcc: tuple[str, ...] = ()
    """CUDA releases that bring no compiler, and for which the host has none that suits."""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment of each configuration's engine."""
    own_ports: frozenset[int] = frozenset()
    """Ports that services of ours listen on at present."""
    must_reach: frozenset[str] = frozenset()
    """URLs that the operator names; the others are sources of what is yet to be fetched."""
    may_reboot: bool = False
    driver_upgrade: bool = False
    """The host stage may replace the driver, so one that is too old is no error."""
    accept_known_bad: frozenset[str] = frozenset()
    """Releases that the host's data takes although they are known to be bad."""
    models: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Release -> checkpoints and families that it serves."""
    unproved: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)
    """Configuration -> why it is unproved, and those of its checkpoints that are not pinned."""

    def releases_on(self, accelerator: str) -> dict[str, Release]:
        """The releases in use for an accelerator."""
        used = {one.release for one in self.serving.values()}
        return {n: r for n, r in self.releases.items() if n in used and r.accelerator == accelerator}


def preflight(facts: HostFacts, decision: Decision, needs: Needs) -> list[Finding]:
    """All findings, errors first."""
    said: dict[Finding, list[Gpu | None]] = {}
    for finding in (finding for check in CHECKS for finding in check(facts, decision, needs)):
        said.setdefault(replace(finding, card=None), []).append(finding.card)
    found = [replace(one, message=f"{_named(cards)}{one.message}") for one, cards in said.items()]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


_error = partial(Finding, Severity.ERROR)
_warning = partial(Finding, Severity.WARNING)
_note = partial(Finding, Severity.NOTE)


def _cards(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    wanted: dict[str, list[str]] = {}
    usable = {card.index for card in decision.cards}
    needed = {index for configuration in needs.serving.values() for index in configuration.gpus}
    for name, configuration in needs.serving.items():
        if missing := [str(index) for index in configuration.gpus if index not in usable]:
            wanted.setdefault(", ".join(missing), []).append(name)
    for missing_cards, names in wanted.items():
        there = f"{len(decision.cards)} usable of {len(facts.gpus)} on the bus"
        yield _error(
            "cards",
            f"{', '.join(names)} need card {missing_cards}, and this host has {there}",
            "look for the missing card in `lspci -d 10de:` and in the kernel's log (Xid), or change `gpus`",
        )
    for gpu in facts.gpus:
        if gpu.taken:
            severity = Severity.ERROR if gpu.index in needed else Severity.WARNING
            off = any(token.endswith("iommu=off") for token in decision.host.kernel_arguments)
            iommu = (
                "host_overrides switches the IOMMU off, without which no guest has it"
                if off
                else "the IOMMU is left as it is"
            )
            remedy = f"give it back to the nvidia driver, or change `gpus`; {iommu}"
            yield Finding(severity, "card-taken", f"belongs to {gpu.bound_to}", remedy, gpu)
        elif gpu.answers is False:
            yield _error("card-silent", "is on the bus and does not answer", "power the host off and on", gpu)
        if gpu.mig:
            yield _error("mig", "is in MIG mode", f"`nvidia-smi -i {gpu.index} -mig 0`", gpu)
    for gpu in decision.left_out:
        if gpu.answers is not False and not gpu.taken:
            yield _warning("card-mixed", "differs from the other cards and serves nothing", card=gpu)


def _links(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    cards = decision.cards
    gen, gen_max, width = (
        max((value for card in cards if (value := getattr(card, name)) is not None), default=0)
        for name in ("link_gen", "link_gen_max", "link_width_max")
    )
    if facts.bare_metal and any(card.model for card in cards):
        gen_max, width = max(gen_max, 5), max(width, 16)  # every card of GPU_MODELS
    for card in cards:
        if (card.link_gen_max or gen_max) < gen_max:
            yield _warning(
                "link-speed",
                f"has PCIe gen {card.link_gen_max} at most in this slot, the cards can do {gen_max}",
                "check slot, riser and BIOS, where the CPU has that generation",
                card,
            )
        elif (card.link_gen or gen) < gen:
            yield _warning(
                "link-speed",
                f"runs at PCIe gen {card.link_gen} and others at {gen}",
                "cards at rest lower it: look again under load",
                card,
            )
        if (card.link_width or width) < width:
            yield _warning(
                "link-width",
                f"has {card.link_width} of {width} lanes",
                "check slot, riser and bifurcation",
                card,
            )
        if len(cards) > 1 and card.bar1_bytes and card.memory_mib and card.bar1_bytes < card.memory_mib << 20:
            yield _warning(
                "bar1",
                f"shows {card.bar1_bytes / GIB:g} GiB of its memory on the bus (BAR1): no P2P",
                "switch on Above 4G Decoding and Resizable BAR, and the card's compute mode (displaymodeselector)",
                card,
            )


def _driver(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    driver, contained = facts.driver, facts.container not in (None, "none")
    if all(gpu.taken for gpu in facts.gpus):
        return
    outside = "the driver belongs to the host outside this container: for whoever has it" if contained else ""
    replaced = _warning if contained else _note if needs.driver_upgrade else _error
    if contained:
        if "version mismatch" in (driver.smi_error or ""):
            library = driver.library or "another version"
            yield _error(
                "driver-mismatch",
                f"the host outside this container runs driver {driver.version}, the libraries in it are {library}",
                f"make the container's driver libraries equal the host's ({driver.version}): start it by NVIDIA's "
                "container toolkit, or install that version in it",
            )
            return
    elif driver.mismatch:
        installed = f"{driver.on_disk or 'another version'} is installed"
        yield _warning(
            "driver-mismatch",
            f"driver {driver.version} is loaded, {installed}: no CUDA before a reboot",
            "`make reboot`",
        )
        return  # the next deploy compares what is loaded then
    if driver.smi_error:
        yield _error("nvidia-smi", f"nvidia-smi: {driver.smi_error}", "see the kernel's log (NVRM, Xid)")
    if driver.open_module is False and any((gpu.compute_capability or (0, 0)) >= (10, 0) for gpu in facts.gpus):
        remedy = "set driver_upgrade for this host, or install nvidia-open in place of the proprietary modules yourself"
        yield replaced(
            "driver-proprietary",
            "Blackwell cards need the open kernel modules (sapcc/metal-images#399)",
            outside or remedy,
        )
    if driver.version is None:
        installs = f"a reboot loads {driver.on_disk}" if driver.on_disk else "the host stage installs it"
        yield _note("driver-none", "no NVIDIA driver is loaded", outside or installs)
        return
    for name, release in needs.releases_on("cuda").items():
        if version_tuple(driver.version) < version_tuple(release.minimum_driver):
            text = f"release {name} needs driver {release.minimum_driver}, this host has {driver.version}"
            unasked = "a working driver is not changed unasked: set driver_upgrade for this host"
            remedy = "the host stage replaces it" if needs.driver_upgrade else unasked
            yield replaced("driver-old", text, outside or remedy)
    if len(facts.device_nodes) < sum(not gpu.taken for gpu in facts.gpus) or not facts.nvidia_uvm_node:
        yield _error(
            "device-nodes",
            f"{len(facts.device_nodes)} of {len(facts.gpus)} /dev/nvidia* nodes, "
            f"/dev/nvidia-uvm {'is' if facts.nvidia_uvm_node else 'is not'} there (NVIDIA/gpu-operator#2685)",
            "`nvidia-modprobe -u -c 0`, and start nvidia-persistenced",
        )


def _compilers(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    home = needs.cuda_home
    version = facts.toolkits.get(home) if home else None
    if home is not None and version is None:
        why = "says no version" if home in facts.toolkits else "is not there"
        yield _error(
            "cuda-home",
            f"cuda_home is {home}, and {home}/bin/nvcc {why}",
            "install the CUDA toolkit there, name another, or leave cuda_home out",
        )
    elif version is not None and version < SERVE:
        does = "neither builds nor compiles" if version < BUILD else "builds, and does not compile at serve time,"
        severity = Severity.ERROR if version < BUILD else Severity.WARNING
        yield Finding(
            severity,
            "cuda-old",
            f"{home} is CUDA {_dotted(version)}, which {does} for SM120 (vllm-project/vllm#50705)",
            f"{_dotted(BUILD)} builds, {_dotted(SERVE)} does both",
        )
    if home is None and needs.without_nvcc and decision.cards and decision.cards[0].compute_capability == (12, 0):
        have = ", ".join(f"{path} ({_dotted(found)})" for path, found in facts.toolkits.items()) or "none"
        yield _warning(
            "cuda-none",
            f"{', '.join(needs.without_nvcc)}: kernels that are compiled at the first request need a CUDA toolkit of "
            f"their version, {_dotted(SERVE)} or newer (flashinfer-ai/flashinfer#3633); this host has {have}",
            "install one (cuda-nvcc and cuda-cudart-dev of NVIDIA's repository), or set VLLM_USE_FLASHINFER_SAMPLER=0",
        )
    if facts.gcc is not None and facts.gcc >= (16,):
        yield _warning(
            "gcc-new", f"gcc {_dotted(facts.gcc)} breaks what nvcc compiles for SM120", "install gcc-15 or older"
        )


def _dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version)) if version else "unknown version"


def _secure_boot(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    if not facts.secure_boot or not facts.gpus:
        return
    if facts.driver.on_disk and not facts.driver.signer:
        yield _error(
            "secure-boot",
            "secure boot is on and the nvidia module has no signature: it will not load",
            "enrol the DKMS key (mokutil --import), install signed modules, or switch secure boot off",
        )
    elif not facts.driver.on_disk and facts.driver.version is None:
        yield _warning(
            "secure-boot",
            "secure boot is on: modules that DKMS builds load only once their key is enrolled at the console",
            "use the distribution's signed modules, or switch secure boot off",
        )


def _memory(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for one in needs.fits:
        remedy = "lower context_length, raise memory_fraction, or take an FP8 cache where the engine has one"
        if one.tokens >= one.context:
            remedy = "lower max_running_requests"
        if one.for_cache <= 0:
            remedy = "raise tensor_parallel, or take a smaller checkpoint"
        if one.refused:
            yield _error("memory-fit", f"{one.name} does not fit: {one}", remedy)
        elif not one.starts:
            message = f"{one.name} may not fit (what activations and graphs take is an estimate): {one}"
            yield _warning("memory-tight", message, f"if it does not start, {remedy}")
        elif one.tokens < 2 * one.context:
            many = "one request of full length" if one.fits else "no request of full length"
            yield _warning("memory-tight", f"{one.name} has room for {many}: {one}")
    accounted = {one.name for one in needs.fits}
    for missing in sorted(set(needs.not_accounted.values())):
        of = [name for name, why in needs.not_accounted.items() if why == missing]
        names = ", ".join(of)
        told = f"whether {names} fits into memory is not known"
        if accounted.issuperset(of):
            told = f"the memory account of {names} leaves the drafter out"
        yield _note("memory-unknown", f"{told}: {missing}")
    shm = facts.paths.get(SHM)
    if needs.releases_on("cuda") and shm is not None and shm.free < SHM_WANTED:
        yield _warning(
            "shm",
            f"{SHM} has {shm.free / GIB:.1f} GiB free; engines want 8 or more (sgl-project/sglang#40723)",
            "remove what a killed engine left there, or mount it larger",
        )


def _space(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for one in needs.disk:
        if not one.size:
            yield _error("space", f"{one.mount}: its free space is not known", "see `make explain` for the reason")
        elif not one.fits:
            cure = f"make room ({one.cure})" if one.cure else "make room there"
            yield _error("space", one.shortage, f"{cure}, or move the path (inventory/group_data)")
    for path, place in facts.paths.items():
        if path not in ("/", SHM):
            yield from _file_system(place)


def _file_system(place: DataPath) -> Iterator[Finding]:
    if place.filesystem in ("tmpfs", "overlay", "ramfs"):
        yield _warning("ephemeral", f"{place.path} is on {place.filesystem}: it is empty after a reboot", "use a disk")
    if place.filesystem == "zfs":
        yield _warning("zfs", f"{place.path} is on ZFS, which froze several such hosts", "ext4 is what others run")
    for disk in place.disks:
        if disk.model and EPHEMERAL.search(disk.model):
            yield _warning("ephemeral", f"{place.path} is on {disk.model}, which the provider does not keep")


def _lent_out(facts: HostFacts, port: int) -> str:
    """The range of local ports that a port is in and not reserved from; empty where it is in none."""
    bounds = [int(one) for one in re.findall(r"\d+", facts.sysctls.get("net.ipv4.ip_local_port_range") or "")]
    parts = re.findall(r"(\d+)(?:-(\d+))?", facts.sysctls.get("net.ipv4.ip_local_reserved_ports") or "")
    reserved = any(int(low) <= port <= int(high or low) for low, high in parts)
    return f"{bounds[0]}-{bounds[1]}" if len(bounds) == 2 and bounds[0] <= port <= bounds[1] and not reserved else ""


def _shared_port(port: int, serving: Mapping[str, Configuration]) -> Iterator[Finding]:
    """Configurations on other cards that exclude each other by a port that one of them did not choose."""
    for name, one in serving.items():
        beside = [other for other, its in serving.items() if its.gpus and not set(its.gpus) & set(one.gpus)]
        if one.gpus and beside and "port" not in one.listen.model_fields_set:
            yield _warning(
                "port-shared",
                f"{name} takes port {port} because its entry names none, as {', '.join(beside)} on other cards: they "
                "cannot run beside each other",
                f"give {name} a port of its own: listen: {{port: {port + 1}}}",
            )


def _system(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for name, release in (needs.releases_on("cuda") | needs.releases_on("cpu")).items():
        if release.minimum_glibc and facts.glibc and facts.glibc < version_tuple(release.minimum_glibc):
            have = _dotted(facts.glibc)
            yield _error("glibc", f"release {name} needs glibc {release.minimum_glibc}, this host has {have}")
    ports: dict[int, list[str]] = {}
    for name, configuration in needs.serving.items():
        ports.setdefault(configuration.listen.port, []).append(name)
    for port, names in ports.items():
        yield from _shared_port(port, {name: needs.serving[name] for name in names})
        if facts.ports is not None and port in facts.ports and port not in needs.own_ports:
            yield _warning("port", f"port {port} of {', '.join(names)} is taken", f"see `ss -ltnp sport = :{port}`")
        if lent := _lent_out(facts, port):
            yield _warning(
                "port-lent",
                f"port {port} of {', '.join(names)} is one that the host gives to outgoing connections ({lent}): a "
                "start fails while one has it",
                f"reserve it (net.ipv4.ip_local_reserved_ports={port} in /etc/sysctl.d), or listen on another",
            )
    for url, why in facts.probes.items():
        if why is not None:
            severity = Severity.ERROR if url in needs.must_reach else Severity.WARNING
            message = f"{url} cannot be reached from the host: {why}"
            yield Finding(severity, "source", message, "check DNS, proxy and firewall")
    if facts.clock_synchronised is False:
        remedy = (
            f"the host stage starts {TIME_UNIT}" if TIME_UNIT in facts.units else "install systemd-timesyncd or chrony"
        )
        yield _warning("clock", "the clock is not synchronised", remedy)
    if facts.cpu.turin and (version_tuple(facts.kernel) or (99,)) < (6, 17):
        yield _note("kernel-old", f"kernel {facts.kernel} shows xGMI links of EPYC Turin as unknown; 6.17 does not")


def _unproved(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for name, (why, unpinned) in needs.unproved.items():
        message = f"{name} is unproved: {why}"
        if unpinned:
            pins = ", ".join(f"`make pin CHECKPOINT={one}`" for one in unpinned)
            yield _error("unproved", message, f"{pins}, then read its entries over")
        else:
            yield _warning("unproved", message, "take `unproved` out of its entry once it was accepted here")


def _known_bad(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for name, release in (needs.releases_on("cuda") | needs.releases_on("cpu")).items():
        served = needs.models.get(name, frozenset())
        concerned = [one for one in release.known_bad if not one.models or served.intersection(one.models)]
        for bad in (one for one in concerned if one.models and not one.refuse):
            of = ", ".join(sorted(served.intersection(bad.models)))
            yield _warning(
                "known-trap", f"{name} with {of}: {bad.what} ({bad.thread})", "measure and ask before you rely on it"
            )
        for bad in (one for one in concerned if one.refuse):
            message = f"release {name} is known to be bad: {bad.what} ({bad.thread})"
            if name in needs.accept_known_bad:
                yield _warning("known-bad", message, "it is taken because the host's accept_known_bad names it")
            else:
                yield _error("known-bad", message, "choose another release, or name it in the host's accept_known_bad")


def _rivals(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    if not facts.gpus:
        return
    for name in RIVALS:
        if name in facts.units and facts.units[name].active:
            yield _warning("rival", f"{name} runs and may hold GPU memory", f"`systemctl disable --now {name}`")
    for process in facts.processes or ():
        yield _note(
            "gpu-in-use", f"process {process.pid} ({process.name}) holds {process.memory_mib} MiB of {process.gpu_uuid}"
        )
    held = set(facts.holds) | set(facts.upgrade_blacklist)
    if facts.unattended_upgrades and not _covered("linux-image", held):
        yield _note(
            "unattended-kernel",
            "unattended upgrades may install a kernel: the next boot takes it, and DKMS builds the driver's module for "
            "it where its headers are installed too",
            'put "linux-image" into Unattended-Upgrade::Package-Blacklist to keep this one',
        )
    newest = max(facts.kernels, key=lambda one: [int(part) for part in re.findall(r"\d+", one)], default=facts.kernel)
    if facts.gpus and facts.driver.on_disk and newest != facts.kernel and not facts.kernels[newest or ""]:
        yield _warning(
            "kernel-no-driver",
            f"the next boot takes kernel {newest}, and there is no nvidia module for it: no GPU would answer",
            f"`apt-get install linux-headers-{newest}` builds it (DKMS); linux-headers-amd64 or linux-headers-generic, "
            "as the kernel's own package is named, brings those of every later one",
        )
    drivers = [name for name in facts.packages if re.match(r"nvidia-(open|driver|dkms)|cuda-drivers", name)]
    if facts.unattended_upgrades and any(not _covered(name, held) for name in drivers or ["nvidia-open"]):
        yield _warning(
            "unattended-upgrades",
            "unattended upgrades may change kernel and driver under a running engine",
            "the host stage holds a driver that it installs; put nvidia into Unattended-Upgrade::Package-Blacklist",
        )


def _covered(package: str, patterns: set[str]) -> bool:
    return any(package == pattern or package.startswith(pattern.rstrip("-*")) for pattern in patterns)


def _settings(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    if "host" in facts.unknown:
        yield _warning("facts", f"the host could not be read: {facts.unknown['host']}", "deploy again after this run")
    waiting, later = (asked(decision.settings, facts) for asked in (reboot_needed, reboot_recommended))
    if later:
        text = ", ".join(one.key for one in later)
        yield _note("reboot-later", f"recommended at the next reboot, and waited for by nothing: {text}")
    if waiting:
        text = ", ".join(one.key for one in waiting)
        remedy = "`make reboot`" if needs.may_reboot else "allow it with --data reboot=yes, or reboot it yourself"
        yield _note("reboot", f"needs a reboot before serving: {text}", remedy)
    if facts.virtualisation not in (None, "none") and facts.container in (None, "none"):
        yield Finding(
            Severity.WARNING if waiting and needs.may_reboot else Severity.NOTE,
            "virtual",
            f"this is a virtual machine ({facts.virtualisation}): IOMMU, ACS and links are its host's, and a provider "
            "may not bring it back, or not with the same disks, after a reboot",
            "ask the provider before `make reboot`",
        )
    if facts.container not in (None, "none"):
        outside = [f"{one.key} = {one.value}" for one in decision.settings if one.outside and one.founded]
        yield _note(
            "container",
            f"this is a container ({facts.container}): kernel, driver and units are its host's",
            f"for whoever has the host: {', '.join(outside)}" if outside else "",
        )
    if tokens := [kernel_token(one) for one in decision.settings if one.blocked and one.kind is Kind.KERNEL_ARGUMENT]:
        yield _warning("boot-loader", f"{NO_LOADER}: {', '.join(tokens)}", "add them to what boots this host yourself")
    for one in decision.settings:
        if one.blocked and one.kind is not Kind.KERNEL_ARGUMENT:
            yield _warning("setting-blocked", f"{one.key}: {one.reason}")
        if one.confidence is Confidence.OPERATOR:
            value = one.value if one.applied else "left alone"
            yield _note("override", f"{one.key} = {value} by override; the policy has {one.replaces or 'no opinion'}")
        if one.kind is Kind.POWER_LIMIT and one.applied:
            yield from _power(int(one.value or 0), decision.cards)
    for name, configuration in needs.serving.items():
        yield from _attention(name, configuration, decision, needs)


def _nccl(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for name, variables in needs.variables.items():
        disable, level = (variables.get(f"NCCL_P2P_{one}") for one in ("DISABLE", "LEVEL"))
        if disable == "1" and level not in (None, "LOC"):
            yield _warning(
                "p2p-contradiction",
                f"{name} gets NCCL_P2P_DISABLE=1 and NCCL_P2P_LEVEL={level}: NCCL then uses no P2P, whatever the level",
                "leave one of them out of host_overrides or the catalogue; null in host_overrides unsets the policy's",
            )


def _health(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    for error in sorted(set(facts.xids)):
        yield _warning("xid", f"the driver reported {error} on this boot", "NVIDIA's list of Xid codes says what it is")
    for card in decision.cards:
        if card.ecc_errors:
            yield _warning("ecc", f"has {card.ecc_errors} uncorrectable memory errors", "reset or replace it", card)
        if found := [f"{card.aer[name]} {name}" for name in ("fatal", "nonfatal") if card.aer.get(name)]:
            yield _warning("aer", f"has PCIe errors: {', '.join(found)}", "check slot, riser and cables", card)
        elif card.aer.get("correctable", 0) > CORRECTABLE:
            yield _note("aer", f"has {card.aer['correctable']} corrected PCIe errors since boot", card=card)
        shipped = card.power_default_w or (card.model.power_w if card.model else None)
        asked = decision.host.power_limit_w
        if card.power_limit_w and shipped and card.power_limit_w < shipped and asked is None:
            yield _warning(
                "power-low",
                f"is limited to {card.power_limit_w:g} W of the {shipped:g} W it is shipped with",
                "`nvidia-smi -pl`, or name the limit in host_overrides (power_limit.watts)",
                card,
            )
    if old := sorted({"RMForceP2PType", "RMPcieP2PType"} & key_values(facts.parameter("nvidia", DWORDS) or "").keys()):
        yield _note(
            "registry-keys",
            f"{' and '.join(old)} are live in RegistryDwords: with them a driver was seen to offer P2P that then fails "
            "('invalid device ordinal'), and cuMem IPC to break with NCCL 2.29 and newer",
            "where that happens, remove them from their file in /etc/modprobe.d, and from ours by host_overrides",
        )
    if facts.preload:
        yield _warning(
            "preload",
            f"/etc/ld.so.preload puts {', '.join(facts.preload)} into every process: one that answers for CUDA or NVML "
            "shows an engine other cards and other memory (Project-HAMi/HAMi#2641)",
            "remove it from there, unless it is yours and meant",
        )


def _peer_groups(facts: HostFacts, decision: Decision, needs: Needs) -> Iterator[Finding]:
    cards = decision.cards
    direct = len(cards) > 1 and all(card.model is None or card.model.links == "pcie" for card in cards)
    if not direct or any(word.startswith("NV") for row in facts.relations for word in row):
        return
    if facts.virtualisation not in (None, "none") and not any(card.clique for card in cards):
        yield _note(
            "clique",
            "the hypervisor does not say which cards may reach each other (no x-nv-gpudirect-clique was seen): "
            "P2P may be missing or slow (club-3090#884)",
            "set x-nv-gpudirect-clique for the cards in the hypervisor, where the cards share a switch",
        )
    if len(cards) > PEERS + 1:
        places: dict[object, list[int]] = {}
        nodes = {card.numa_node for card in cards}
        for card in cards:
            port = card.bridges[0] if card.bridges else card.host_bridge
            places.setdefault(card.numa_node if len(nodes) > 1 else port, []).append(card.index)
        groups = "; ".join(", ".join(map(str, group)) for group in places.values())
        yield _warning(
            "peers",
            f"{len(cards)} cards: CUDA lets each reach {PEERS} others at most, so not all of a group of more than "
            f"{PEERS + 1} are peers. Cards that are close: {groups}",
            "keep a configuration within such groups, at most 8 ranks each",
        )


def _power(watts: int, cards: tuple[Gpu, ...]) -> Iterator[Finding]:
    for card in cards:
        low, high = card.power_min_w, card.power_max_w
        if low is not None and high is not None and not low <= watts <= high:
            yield _error("power-limit", f"allows {low:g} to {high:g} W, the override asks for {watts} W", card=card)


def _attention(name: str, configuration: Configuration, decision: Decision, needs: Needs) -> Iterator[Finding]:
    release = needs.releases.get(configuration.release)
    if release is None or not decision.cards or decision.cards[0].compute_capability != (12, 0):
        return
    for flag in ("attention-backend", "decode-attention-backend", "prefill-attention-backend"):
        backend = str(configuration.flags.get(flag, ""))
        if why := REFUSED_ATTENTION[release.engine].get(backend):
            known = decision.find(f"attention.{release.engine}")
            instead = known.value if known is not None else "another one"
            yield _error("attention", f"{name}: --{flag} {backend} {why}", f"take {instead}")


def _named(about: Iterable[Gpu | None]) -> str:
    cards = [card for card in about if card is not None]
    if len(cards) > 1:
        return f"each of cards {', '.join(str(card.index) for card in cards)} "
    return f"card {cards[0].index} ({cards[0].address}) " if cards else ""


CHECKS = (
    _cards,
    _links,
    _health,
    _peer_groups,
    _driver,
    _compilers,
    _secure_boot,
    _memory,
    _space,
    _system,
    _known_bad,
    _unproved,
    _rivals,
    _settings,
    _nccl,
)
