"""What a host's facts decide about its units and its system: the typed values that flow from facts to templates."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rig.catalog.entries import Configuration
from rig.host.evidence import Report
from rigctl.contract.speculation import EXTRACTS

ENGINES = ("vllm", "sglang")
ACS_UNIT = "kimi-acs.service"
PERSISTENCE_UNIT = "nvidia-persistenced.service"
TIME_UNIT = "systemd-timesyncd.service"

# The driver's device nodes: NVIDIA open-gpu-kernel-modules, nv-linux.h and nvidia-uvm; nvidia-caps holds MIG and IMEX.
NVIDIA_DEVICES = ("char-nvidia", "char-nvidia-uvm", "char-nvidia-caps", "char-nvidiactl")


class Kind(StrEnum):
    """What a setting sets. The values are the first half of an override's name."""

    KERNEL_ARGUMENT = "kernel_argument"
    MODULE_OPTION = "module_option"
    BOOT_UNIT = "boot_unit"
    SYSCTL = "sysctl"
    LIMIT = "limit"
    GOVERNOR = "governor"
    DISK_SCHEDULER = "disk_scheduler"
    POWER_LIMIT = "power_limit"
    ENVIRONMENT = "environment"
    ENGINE_FLAG = "engine_flag"
    ATTENTION = "attention"
    MEMORY_FRACTION = "memory_fraction"


class Confidence(StrEnum):
    """How well a setting is founded. SINGLE is explained and never applied."""

    DOCUMENTED = "vendor's documentation or several independent reports"
    MEASURED = "published with figures or by more than one host"
    SINGLE = "a single report"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Setting:
    """One decision with its grounds. name is unique within its kind; value None: to be absent, where applied."""

    kind: Kind
    name: str
    value: str | None
    reason: str
    source: str
    confidence: Confidence
    applied: bool = True
    expected_gain: str = ""
    """The published figure, as published; empty where there is none."""
    engines: tuple[str, ...] = ENGINES
    """Whom it concerns, for the kinds that concern engines."""
    replaces: str | None = None
    """What the policy alone would have: set where an operator's override won."""
    supports: tuple[Report, ...] = ()
    against: tuple[Report, ...] = ()
    kept: bool = False
    """Not applied because the running host has it, or another that works, from elsewhere: value is what is live."""
    blocked: bool = False
    """Not applied because another file of the host wins over ours: the reason names it."""
    outside: bool = False
    """Not applied because it belongs to the host outside this container."""
    needed: bool = False
    """For correctness: no engine is started without it, not even one that was accepted on this boot."""

    @property
    def key(self) -> str:
        """Name of the override that would change it."""
        return f"{self.kind}.{self.name}"

    @property
    def founded(self) -> bool:
        """More than one author, or the vendor, reports it."""
        return self.confidence is not Confidence.SINGLE

    @property
    def needs_reboot(self) -> bool:
        """It takes effect when the kernel, or the driver's modules, are loaded anew."""
        return self.kind in (Kind.KERNEL_ARGUMENT, Kind.MODULE_OPTION)


@dataclass(frozen=True)
class HostSettings:
    """Settings of one host: what its units and its system take over.

    environment: variables for the engine process, by engine name ("vllm", "sglang").
    device_allow: device nodes the units may open; empty where no GPU was found.
    """

    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device_allow: tuple[str, ...] = ()
    engine_flags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Flags by engine, without dashes, that a configuration gets unless it names them itself."""
    memory_fraction: Mapping[str, float] = field(default_factory=dict)
    """GPU memory fraction by "<engine>.<kind>" (base, eagle3, eagle3-dcp8) for configurations that name none."""
    attention: Mapping[str, str] = field(default_factory=dict)
    """MLA attention backend by engine."""
    gpus: tuple[int, ...] = ()
    """Indices, in PCI bus order, of the cards that belong together."""
    kernel_arguments: tuple[str, ...] = ()
    module_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sysctls: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    """systemd's names: LimitMEMLOCK and so on."""
    boot_units: tuple[str, ...] = ()
    governor: str | None = None
    disk_scheduler: Mapping[str, str] = field(default_factory=dict)
    """Scheduler by a class of disks ("nvme")."""
    power_limit_w: int | None = None


def settings_from_gpus(gpu_count: int) -> HostSettings:
    """The settings that follow from the GPUs the PCI bus shows, before any driver is there."""
    if gpu_count == 0:
        return HostSettings()
    common = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return HostSettings(environment={"vllm": common, "sglang": common}, device_allow=NVIDIA_DEVICES)


def host_settings(settings: Iterable[Setting], gpus: tuple[int, ...]) -> HostSettings:
    """The applied settings, sorted into the places that take them over."""
    by_kind: dict[Kind, list[Setting]] = {kind: [] for kind in Kind}
    for setting in settings:
        if setting.applied:
            by_kind[setting.kind].append(setting)
    options: dict[str, dict[str, str]] = {}
    for module, name, value in (_module_option(one) for one in by_kind[Kind.MODULE_OPTION]):
        options.setdefault(module, {})[name] = value
    power = _values(by_kind[Kind.POWER_LIMIT]).get("watts")
    return HostSettings(
        environment=_by_engine(by_kind[Kind.ENVIRONMENT]),
        device_allow=NVIDIA_DEVICES if gpus else (),
        engine_flags=_by_engine(by_kind[Kind.ENGINE_FLAG]),
        memory_fraction={n: float(v) for n, v in _values(by_kind[Kind.MEMORY_FRACTION]).items()},
        attention=_values(by_kind[Kind.ATTENTION]),
        gpus=gpus,
        kernel_arguments=tuple(kernel_token(one) for one in by_kind[Kind.KERNEL_ARGUMENT]),
        module_options=options,
        sysctls=_values(by_kind[Kind.SYSCTL]),
        limits=_values(by_kind[Kind.LIMIT]),
        boot_units=tuple(one.name for one in by_kind[Kind.BOOT_UNIT]),
        governor=_values(by_kind[Kind.GOVERNOR]).get("cpu"),
        disk_scheduler=_values(by_kind[Kind.DISK_SCHEDULER]),
        power_limit_w=int(power) if power else None,
    )


def kernel_token(setting: Setting) -> str:
    """A kernel argument as it stands on the command line."""
    return f"{setting.name}={setting.value}" if setting.value else setting.name


def with_host(configuration: Configuration, engine: str, settings: HostSettings) -> Configuration:
    """A catalogue entry with what it leaves to the host: flags and, where it says `host`, the memory fraction. What it
    names itself wins.

    settings: those of this configuration (rig/host/topology.py, Workload).
    """
    if not configuration.gpus:
        return configuration
    chosen = settings.engine_flags.get(engine, {})
    flags = {name: True if value == "true" else value for name, value in chosen.items()}
    drafts = configuration.speculation is not None and configuration.speculation.method not in ("ngram", EXTRACTS)
    kind = "eagle3" if drafts else "base"
    if int(str(configuration.flags.get("decode-context-parallel-size", 1))) >= 8 and kind == "eagle3":
        kind = "eagle3-dcp8"
    # A plan that is made in two steps asks again.
    fraction = settings.memory_fraction.get(f"{engine}.{kind}", "host")
    return configuration.model_copy(
        update={
            "flags": {**flags, **configuration.flags},
            "memory_fraction": fraction if configuration.memory_fraction == "host" else configuration.memory_fraction,
        }
    )


def _module_option(setting: Setting) -> tuple[str, str, str]:
    module, _, option = setting.name.partition(".")
    return module, option, setting.value or ""


def _values(settings: Iterable[Setting]) -> dict[str, str]:
    return {one.name: one.value for one in settings if one.value is not None}


def _by_engine(settings: Iterable[Setting]) -> dict[str, dict[str, str]]:
    chosen = [*settings]
    found = {engine: _values(one for one in chosen if engine in one.engines) for engine in ENGINES}
    return {engine: values for engine, values in found.items() if values}
