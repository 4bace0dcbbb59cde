"""The catalogues (inventory/*.yaml) as typed, checked data.

Pure but for reading the files. Every wrong entry raises CatalogError with one line a finding: file, line, entry.
"""

import ipaddress
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from rig.catalog.canary import GENERAL, canary_prompts
from rig.catalog.defaults import DRAFTERS_DRAFT, Defaults, with_defaults
from rig.catalog.drafter_training import DrafterTraining
from rig.catalog.drafter_training import faults as training_faults
from rig.catalog.kept_layers import Memory
from rig.catalog.speculation_flags import FLAGS
from rig.catalog.yaml_source import CatalogError, Document, load
from rigctl.contract.answering import Answer, Parameters, Sampling
from rigctl.contract.checkpoint_job import Role
from rigctl.contract.environment_build import Index
from rigctl.contract.fields import (
    Distribution,
    Dotted,
    HostPath,
    ListenAddress,
    Package,
    Sha256,
    Text,
    Variable,
    host_path,
)
from rigctl.contract.kernel_job import KernelLibrary
from rigctl.contract.manifest import Manifest
from rigctl.contract.order import Part, keys, nearest, words
from rigctl.contract.order import place as place_of
from rigctl.contract.served_checkpoints import Provenance, Training
from rigctl.contract.sources import HubSource, Source
from rigctl.contract.speculation import EXTRACTS, WITH_DRAFTER, Method, check_drafter
from rigctl.errors import RigctlError

ROOT = Path(__file__).resolve().parents[2]
INVENTORY_VARIABLE = "KIMI_RIG_INVENTORY"
SECTIONS = ("serving", "checkpoints", "releases", "families", "training")
ADDED = "add"
"""Section of an overlay with entries that the catalogues do not have."""
OPTIONAL = ("families", "training")
"""Catalogues that an inventory may do without."""

# systemd allows 255 characters in a unit name, with prefix and suffix (systemd.unit(5)).
LONGEST_NAME = 200
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

EngineName = Literal["vllm", "sglang"]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Port = Annotated[int, Field(ge=1024, le=65535)]
Flag = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")]
FlagValue = bool | int | float | str | list[str] | dict[str, Any]
Route = Annotated[str, StringConstraints(pattern=r"^(GET|POST) (/[a-z0-9_-]+)+$")]

# What says the same elsewhere in an entry, where it is checked; a key in argv or a unit file is one that all can read.
OWN_KEYS = {
    "host": "`listen`",
    "port": "`listen`",
    "model": "`target`",
    "model-path": "`target`",
    "served-model-name": "`served_model_name`",
    **dict.fromkeys(("api-key", "admin-api-key", "VLLM_API_KEY"), "the host's api_key_file"),
    "CUDA_VISIBLE_DEVICES": "`gpus`",
    "CUDA_DEVICE_ORDER": "the unit (`gpus` counts in PCI bus order)",
    **dict.fromkeys(("HOME", "PATH"), "the unit, for each engine's own caches and programs"),
    **dict.fromkeys(("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "INVOCATION_ID"), "systemd"),
    **{f"{kind}_DIRECTORY": "systemd" for kind in ("CACHE", "CREDENTIALS", "LOGS", "RUNTIME", "STATE")},
    **dict.fromkeys(("hf-token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), "the host's hub_token_file"),
}

SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:password|passwd|passphrase|secret|credential|(?:api|access|private|auth|account)[_-]?(?:key|token))s?"
    r"(?:$|[_.-])",
    re.IGNORECASE,
)
SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|KEY|APIKEY|PAT|AUTH|PWD)$")
"""Names of secrets. Of flags the last would take too many, such as bucket-time-to-first-token."""

# Units and run-time files of ours that a configuration's would meet (contract/layout.py, rig/host/settings.py).
TAKEN = re.compile(
    r"acs|edge(-.*)?|power-limit|(job|restart|bench)-.*|at-work\.lock|deploy\.lock(\.owner)?|reboot-pending"
)


def inventory_directory() -> Path:
    """Where the catalogues lie: inventory/ of this repository, or the directory that KIMI_RIG_INVENTORY names."""
    return Path(os.environ.get(INVENTORY_VARIABLE) or ROOT / "inventory")


@contextmanager
def catalogues_of(directory: Path) -> Iterator[None]:
    """Within, this process and the programs that it starts read the catalogues of another directory."""
    before = os.environ.get(INVENTORY_VARIABLE, "")
    os.environ[INVENTORY_VARIABLE] = str(directory)
    try:
        yield
    finally:
        os.environ[INVENTORY_VARIABLE] = before


def _checkpoint_path(path: str) -> str:
    variable = re.match(r"\{(models|drafters)\}(?=/)", path)
    if not variable and not path.startswith("/"):
        raise ValueError("a path begins with /, {models}/ or {drafters}/")
    host_path(path[variable.end() :] if variable else path)
    return path


def _network(text: str) -> str:
    ipaddress.ip_network(text, strict=False)
    return text


def _flag_value(value: Any) -> Any:
    try:
        whole = isinstance(value, bool | int | str | dict | list) or math.isfinite(value)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        whole = False
    if not whole or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
        raise ValueError("a flag is true, false, a number, a text, a list of texts, or a mapping that JSON can say")
    return value


def _no_secret(name: str, value: Any, variable: bool = False) -> None:
    """Raise ValueError where a name says that the value is a secret, or an address has a password in it."""
    if SECRET_NAME.search(name) or (variable and SECRET_VARIABLE.search(name)):
        cure = "name a file of yours in `secrets` instead" if variable else "the engine's unit would show it to all"
        raise ValueError(f"{name} is a secret by its name, and all can read a unit: {cure}")
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        _no_secret(str(key), inner)
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and re.search(r"://[^/\s@]*:[^/\s@]+@", text):
            raise ValueError(f"{name} is an address with a password, and all can read a unit")


def _public_variables(found: dict[str, str]) -> dict[str, str]:
    for name, value in found.items():
        if name not in OWN_KEYS:
            _no_secret(name, value, variable=True)
    return found


def _public_flags(found: dict[str, Any]) -> dict[str, Any]:
    for name, value in found.items():
        if name not in OWN_KEYS and not isinstance(value, bool | int | float):
            _no_secret(name, value)
    return found


Network = Annotated[str, AfterValidator(_network)]


Variables = Annotated[dict[Variable, str], AfterValidator(_public_variables)]


class Entry(Part):
    """An entry of a catalogue, or a part of one."""


class Listen(Entry):
    """Where the configuration answers: beyond loopback it is the host's edge that listens (rig/plan/edge.py)."""

    host: ListenAddress = "127.0.0.1"
    port: Port = 8000
    """Beyond loopback the host's data must name an api_key_file, or the entry say open_without_key. Better: `edge` in
    the host's data (docs/how-to/edge.md)."""
    networks: list[Network] = []
    """Networks that may reach an address beyond loopback, as 10.0.0.0/8; none named: everyone."""
    open_without_key: bool = False
    """In as many words: whoever reaches the address may use the engine. February's runs were such."""
    private: bool = False
    """In a network of its own, without a key: nobody reaches it but the stages of a training, which join it."""

    @model_validator(mode="after")
    def _private_is_alone(self) -> Self:
        if self.private and (self.networks or self.open_without_key or not self.loopback):
            raise ValueError("private: nobody else reaches it; leave host, networks and open_without_key out")
        return self

    @property
    def loopback(self) -> bool:
        """True when nothing outside this machine can reach the address."""
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


class Speculation(Entry):
    """Speculation: by which method, with which drafter, and how many tokens are drafted a step."""

    method: Method = "eagle3"
    """When unset, the method of the drafter's entry."""
    drafter: Text | None = None
    """A checkpoint, for the methods that need one: eagle3 and dflash. mtp drafts by the target's own head, ngram by
    what the text says already."""
    steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted before each verification pass: vLLM's num_speculative_tokens, SGLang's --speculative-num-steps. Of
    mtp, when unset, what the target's entry recommends."""
    topk: Annotated[int, Field(ge=1)] = 1
    draft_tokens: Annotated[int, Field(ge=2)] | None = None
    """SGLang only; topk 1 forces steps + 1 (engines.md, section 2)."""
    options: dict[str, Any] = {}
    """Further keys of vLLM's --speculative-config, such as attention_backend; of --kv-transfer-config where states are
    extracted."""
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """extract_hidden_states only: layers whose input is written down; the number of layers is what the head reads."""
    break_even_length: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Acceptance length below which it is slower than no drafter, once measured; the host's acceptance_floor else."""

    @model_validator(mode="after")
    def _drafter_where_the_method_has_one(self) -> Self:
        check_drafter(self.method, self.drafter)
        if (self.method == EXTRACTS) != (self.layers is not None):
            raise ValueError(f"layers: {EXTRACTS} needs them, no other method has them")
        return self

    @property
    def verified(self) -> int:
        """Tokens that one step verifies, with the bonus token."""
        return self.draft_tokens or self.steps + 1


class Accept(Entry):
    """Policies of the catalogue from which an entry departs on purpose; the value is the reason, for the reader."""

    unequal_limit: Text | None = None
    """Another max_running_requests than the configurations it is compared with."""
    differs_from_base: Text | None = None
    """NAME-current differs from NAME in more than its release."""


class Configuration(Entry):
    """One serving configuration: one systemd unit, kimi-<name>.service."""

    extends: str | None = None
    """Another entry that this one changes: mappings merge, null removes."""
    description: str = ""
    """For people; a change restarts nothing."""
    release: Text
    """An entry of releases.yaml."""
    target: Text
    """An entry of checkpoints.yaml."""
    served_model_name: Text | None = None
    """Name clients use; the target's path when unset, which is what both engines default to."""
    gpus: list[Annotated[int, Field(ge=0, le=63)]]
    """GPU indices in PCI bus order; empty for an engine that runs on the CPU. Configurations that share a GPU or the
    port exclude each other."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    listen: Listen = Listen()
    context_length: Annotated[int, Field(ge=256)] | None = None
    """Tokens of prompt and answer together; the model's own limit when unset."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    """Always set for a fair comparison: SGLang silently takes 48 with speculation when unset."""
    memory_fraction: Fraction | Literal["host"] | None = None
    """Share of GPU memory: vLLM's --gpu-memory-utilization, SGLang's --mem-fraction-static. host: what the host's
    policy decides. The family's when unset, and without one the engine's own."""
    memory_reserve: Annotated[int, Field(ge=0)] | None = None
    """Bytes on each GPU that go to activations and graphs, for the memory account; the family's when unset."""
    answer: Answer = Answer()
    """How the model answers; what is unset is the family's."""
    quiet: Parameters = {}
    """Parameters of the watchdog's question; the family's when unset."""
    sampling: Sampling = {}
    """Parameters of `rigctl chat`; the family's when unset."""
    tool_call_parser: Text | None = None
    """The family's when unset, none with null. Refused where the release registers no such parser."""
    reasoning_parser: Text | None = None
    """Likewise."""
    trust_remote_code: bool = False
    speculation: Speculation | None = None
    flags: Annotated[dict[Flag, Annotated[FlagValue, BeforeValidator(_flag_value)]], AfterValidator(_public_flags)] = {}
    """Every other flag, without its dashes: true is the bare flag, false its negative form (--no-...) or nothing where
    off is its default, a mapping is JSON. Only the installed engine can validate them: a deploy asks it before it
    writes units."""
    environment: Variables = {}
    """Variables of the engine process. All can read a unit: names of secrets (..._TOKEN, ..._KEY, ...PASSWORD...) and
    addresses with a password are refused, here and in `flags`."""
    secrets: dict[Variable, Text] = {}
    """Variable -> file of the machine that deploys, which only its owner reads: its one line reaches the engine as a
    credential of the unit, and is in no unit, command line or log. A changed secret counts from the next start."""
    accept: Accept = Accept()
    unproved: Text | None = None
    """Why it has not been tried. A host gets it by name alone; a deploy refuses it until its checkpoints are pinned."""

    @property
    def fraction(self) -> float | None:
        """Share of GPU memory as far as it is decided."""
        return None if self.memory_fraction == "host" else self.memory_fraction

    @property
    def drafter(self) -> str | None:
        """Name of the drafter's checkpoint; None where it speculates without one, or not."""
        return self.speculation.drafter if self.speculation else None

    @property
    def used(self) -> list[str]:
        """Names of the checkpoints that it serves with."""
        return [self.target, *([self.drafter] if self.drafter else [])]


class Head(Entry):
    """Layers in a target's own checkpoint that draft (MTP)."""

    layers: Annotated[int, Field(ge=1)] = 1
    steps: Annotated[int, Field(ge=1, le=16)] | None = None
    """Drafted tokens a step that its makers recommend."""


class Heads(Entry):
    """What a target can draft with by itself."""

    mtp: Head | None = None


class Parsers(Entry):
    """Parsers of one engine, by its own names."""

    tool: Text | None = None
    reasoning: Text | None = None


class Family(Entry):
    """What models of one family have in common, whichever engine or host serves them. A serving entry wins."""

    architectures: list[Text] = []
    """Of config.json: by these `make add-model` knows the family."""
    parsers: dict[EngineName, Parsers] = {}
    """By engine: the names differ."""
    answer: Answer = Answer()
    quiet: Parameters = {}
    """Parameters that keep the watchdog's question short."""
    sampling: Sampling = {}
    """What its makers recommend."""
    memory_fraction: dict[EngineName, Fraction | Literal["host"]] = {}
    """By engine; host: what the host's policy decides, whose figures are of Kimi-K2 on eight cards."""
    memory_reserve: dict[EngineName, Annotated[int, Field(ge=0)]] = {}
    """By engine: bytes on each GPU that go to activations and graphs."""
    canary: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")] = GENERAL
    """What the quality canary asks: inventory/canary/NAME.yaml."""
    notes: str = ""


class Checkpoint(Entry):
    """A model or a drafter: where it comes from and where it lies on the host."""

    role: Role
    path: Annotated[str, AfterValidator(_checkpoint_path)]
    """Absolute, or below one of the host's path variables: {models}, {drafters}."""
    source: Source
    family: Text | None = None
    """Targets only: an entry of families.yaml."""
    architecture: Text | None = None
    """Targets only: what its config.json says, for what is asked of an engine before it is on the host."""
    title: Text | None = None
    """Targets only: what people call it; the repository's name when unset."""
    digests: dict[Text, Sha256] = {}
    """sha256 of files that are known from elsewhere: whatever the source lists must agree."""
    bandwidth_limit: Annotated[int, Field(ge=1)] | None = None
    """Bytes a second that staging may take."""
    heads: Heads = Heads()
    """Targets only: what its own files can draft with."""
    method: Method | None = None
    """Drafters only: how it drafts, eagle3 when unset."""
    targets: list[str] = []
    """Drafters only: the targets it may serve; another target is allowed and reported."""
    bytes: Annotated[int, Field(ge=1)] | None = None
    """Of all its files, for the space it will need while there is no manifest (inventory/manifests)."""
    shape: dict[str, int | bool | str | list[int] | list[str]] = {}
    """Keys of its config.json, for the memory account before it is on the host (docs/reference/memory.md)."""
    memory: Memory | None = None
    """What its layers keep for a request, where config.json misleads."""
    training: Training = Training()
    provenance: Provenance = Provenance()
    notes: str = ""

    def called(self, name: str) -> str:
        """What people call it. name: its entry's."""
        repository = self.source.repository if isinstance(self.source, HubSource) else name
        return self.title or repository.rpartition("/")[2]

    @model_validator(mode="after")
    def _each_role_has_its_own(self) -> Self:
        drafters = self.training != Training() or self.provenance != Provenance() or self.method
        if self.role == "target" and drafters:
            raise ValueError("training, provenance and method belong to drafters")
        if self.role == "drafter" and (self.heads != Heads() or self.family or self.title or self.architecture):
            raise ValueError("heads, family, title and architecture belong to targets")
        if self.method not in (None, *WITH_DRAFTER):
            raise ValueError(f"{self.method} has no drafter; a drafter's method is one of {', '.join(WITH_DRAFTER)}")
        return self


class KnownBad(Entry):
    """A combination that is known not to work, with the thread that says so."""

    what: Text
    thread: Text
    models: list[Text] = []
    """Checkpoints or families of which alone this is so; a host that serves none of them is not concerned."""
    refuse: bool = False
    """A deploy refuses the release unless the host's accept_known_bad names it. Else a deploy reports it where `models`
    says of what, and without them it is for the reader."""


class Toolchain(Entry):
    """What kernels are compiled with, also by engines that compile while they serve."""

    lock: Annotated[str, StringConstraints(pattern=r"^files/locks/[\w.-]+(\{python\})?[\w.-]*\.txt$")]
    """Lock file of the tools; {python} stands for 311 or 312. May hold the CUDA toolkit too."""
    cuda_home: HostPath | None = None
    """A toolkit that is on the host; unset: the one in the lock."""
    packages: list[Package] = []
    """Packages of NVIDIA's repository (host data driver_keyring) that bring it."""


class Kernel(KernelLibrary):
    """The kernel library of a release as its entry describes it."""

    toolchain: Toolchain
    patches: Annotated[str, StringConstraints(pattern=r"^files/patches(/\w[\w.-]*)+$")] | None = None


class Locked(Entry):
    """What is installed from a lock, in an environment of its own."""

    version: Text
    package: Distribution
    """Name of the distribution that it is there for."""
    lock: Annotated[str, StringConstraints(pattern=r"^files/locks/[\w.-]+(\{python\})?[\w.-]*\.txt$")]
    """Lock file with hashes; {python} stands for 311 or 312."""
    python: Annotated[list[Literal["3.11", "3.12"]], Field(min_length=1)]
    accelerator: Literal["cuda", "cpu"] = "cuda"
    patches: Annotated[str, StringConstraints(pattern=r"^files/patches(/\w[\w.-]*)+$")] | None = None
    index: Index | None = None
    kernel: Kernel | None = None
    """Its kernel library, where that is a package of its own (docs/reference/kernel.md)."""
    minimum_driver: Dotted | None = None
    minimum_cuda: Dotted | None = None
    minimum_glibc: Dotted | None = None
    system_packages: list[Package] = []
    """Debian/Ubuntu packages its libraries need."""
    environment: Variables = {}
    """Variables every configuration of this release needs."""


class Trainer(Locked):
    """A release that trains drafters and serves nothing."""

    kind: Literal["trainer"]


class Release(Locked):
    """One engine release: what is installed, how it is started, what is known of it."""

    engine: EngineName
    launch: Annotated[list[Text], Field(min_length=1)]
    """Arguments after the environment's python."""
    features: list[Text] = []
    """Features to ask of the installed code (rigctl probe) beyond what its configurations need."""
    known_bad: list[KnownBad] = []
    drain: Literal["none", "signal", "flag"] = "none"
    """What it does with running requests when it is asked to stop: drops them ("none": we wait before we ask), finishes
    them ("signal"), or finishes them for as long as its --shutdown-timeout says ("flag")."""
    rate_counts_bonus: bool = False
    """Whether its own acceptance rate counts the bonus token: accepted and bonus tokens / all draft tokens."""
    harmless_log: list[Text] = []
    """Log lines that look like failures and are none."""
    api: list[Route] = ["GET /v1/models", "POST /v1/chat/completions", "POST /v1/completions"]
    """What the host's edge lets through to it."""


E_ = TypeVar("E_", bound=Part)


@dataclass(frozen=True)
class Catalog:
    """All entries by name, checked against each other."""

    serving: Mapping[str, Configuration]
    checkpoints: Mapping[str, Checkpoint]
    releases: Mapping[str, Release]
    families: Mapping[str, Family] = field(default_factory=dict)
    training: Mapping[str, DrafterTraining] = field(default_factory=dict)
    trainers: Mapping[str, Trainer] = field(default_factory=dict)
    """Releases of kind trainer."""
    defaults: Mapping[str, Defaults] = field(default_factory=dict)
    """By configuration: what its entry left to the family and to the checkpoints."""


def load_catalog(overlay: str | None = None, inventory: Path | None = None) -> Catalog:
    """Read and check the catalogues below `inventory`, with one overlay (inventory/overlays/) laid on them.

    inventory: the directory of this run (inventory_directory) when unset.
    An overlay has sections of the catalogues' names; its entry names may be patterns (`vllm-*`). Below `add` it has
    such sections with entries of its own.
    Raises CatalogError listing every finding.
    """
    return _load(overlay, inventory or inventory_directory())


@cache
def _load(overlay: str | None, inventory: Path) -> Catalog:
    documents = {name: _read(inventory, f"{name}.yaml") for name in SECTIONS if name not in OPTIONAL}
    for name in OPTIONAL:
        there = (inventory / f"{name}.yaml").exists()
        documents[name] = _read(inventory, f"{name}.yaml") if there else Document()
    if overlay is not None:
        if not (inventory / "overlays" / overlay).is_file():
            raise CatalogError(f"catalogue_overlay: inventory/overlays/{overlay} cannot be read: there is no such file")
        documents = _overlaid(documents, _read(inventory, f"overlays/{overlay}"))
    findings: list[Finding] = []
    documents["serving"] = _resolve_extends(documents["serving"], findings)
    documents["serving"], defaults = with_defaults(documents)
    trainers, engines = _by_kind(documents["releases"])
    catalog = Catalog(
        _parse(documents["serving"], Configuration, "serving", findings),
        _parse(documents["checkpoints"], Checkpoint, "checkpoints", findings),
        _parse(engines, Release, "releases", findings),
        _parse(documents["families"], Family, "families", findings),
        _parse(documents["training"], DrafterTraining, "training", findings),
        _parse(trainers, Trainer, "releases", findings),
        defaults,
    )
    if not documents["serving"].data and not findings:
        raise CatalogError(f"{inventory.name}/serving.yaml:1: serving: there is no configuration in it")
    findings += _cross_check(catalog, documents)
    findings += _check_manifests(catalog, documents["checkpoints"], inventory / "manifests")
    findings += _check_canaries(catalog, documents["families"], inventory)
    if findings:
        raise CatalogError(_told(findings))
    return catalog


def _by_kind(releases: Document) -> tuple[Document, Document]:
    """Releases that state a kind, and those of engines."""
    others = {name for name, value in releases.data.items() if isinstance(value, Mapping) and "kind" in value}
    return (
        Document({name: value for name, value in releases.data.items() if name in others}, releases.places),
        Document({name: value for name, value in releases.data.items() if name not in others}, releases.places),
    )


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. path: the entry's name, then keys."""

    place: str
    section: str
    path: tuple[str | int, ...]
    message: str


def _told(findings: Iterable[Finding]) -> str:
    """One line a mistake: what an overlay's pattern or an extended entry brings into many entries is reported once."""
    entries: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        entries.setdefault((one.place, one.section, one.path[1:], one.message), []).append(one)
    lines = []
    for first, *others in entries.values():
        more = f" (and in {len(others)} more entries that take it over)" if others else ""
        lines.append(f"{first.place}: {'.'.join(map(str, (first.section, *first.path)))}: {first.message}{more}")
    return "\n".join(lines)


def overlays(inventory: Path) -> list[str | None]:
    """No overlay, then the file names of all."""
    return [None, *sorted(path.name for path in (inventory / "overlays").glob("*.yaml"))]


def check_all(inventory: Path | None = None) -> None:
    """Check the catalogues as they stand and under every overlay. Raises CatalogError."""
    directory = inventory or inventory_directory()
    for overlay in overlays(directory):
        load_catalog(overlay, directory)


def forget_catalogs() -> None:
    """Let the next load_catalog read the files again."""
    _load.cache_clear()


def _read(inventory: Path, name: str) -> Document:
    return load(inventory / name, shown_as=f"{inventory.name}/{name}")


def _overlaid(documents: dict[str, Document], overlay: Document) -> dict[str, Document]:
    result = dict(documents)
    for section, patch in _sections(overlay.section(ADDED)):
        for name in patch.data.keys() & result[section].data.keys():
            place = f"{patch.place((name,))}: {ADDED}.{section}.{name}"
            raise CatalogError(f"{place}: {result[section].place((name,))} has it: change it outside of `{ADDED}`")
        result[section] = result[section].merged(patch)
    for section, patch in _sections(overlay, ADDED):
        for pattern in patch.data:
            names = [name for name in result[section].data if fnmatchcase(name, pattern)]
            if not names:
                raise CatalogError(f"{patch.place((pattern,))}: {section}.{pattern}: matches no entry")
            for name in names:
                wrapped = Document(
                    {name: patch.data[pattern]},
                    {(name, *path): place for path, place in patch.section(pattern).places.items()},
                )
                result[section] = result[section].merged(wrapped)
    return result


def _sections(overlay: Document, *beside: str) -> Iterator[tuple[str, Document]]:
    """Sections of an overlay, but for what else it may have."""
    for section, content in overlay.data.items():
        if section not in (*SECTIONS, *beside):
            raise CatalogError(f"{overlay.place((section,))}: {section}: an overlay has {', '.join(SECTIONS)}, {ADDED}")
        if not isinstance(content, Mapping):
            raise CatalogError(f"{overlay.place((section,))}: {section}: expected a mapping of names to entries")
        if section in SECTIONS:
            yield section, overlay.section(section)


def _resolve_extends(serving: Document, findings: list[Finding]) -> Document:
    result = Document()

    def found(path: tuple[str, ...], message: str) -> None:
        findings.append(Finding(str(serving.place(path)), "serving", path, message))

    for name, value in serving.data.items():
        if value is None:
            found((name,), "there is nothing in it")
            continue
        entry, seen = serving.section(name), [name]
        parts = [entry]
        while (base := parts[-1].data.pop("extends", None)) is not None:
            if not isinstance(base, str):
                found((name, "extends"), "the name of one entry")
                break
            if base in seen or base not in serving.data:
                place = serving.places.get((base,))
                absent = f"which {place} removes" if place else "which does not exist"
                why = "extends itself" if base in seen else f"extends {base}, {absent}"
                found((name, "extends"), why)
                break
            seen.append(base)
            parts.append(serving.section(base))
        else:
            # From the lowest up: what an entry removes is of all below it.
            entry = reduce(Document.merged, reversed(parts))
            whole = entry.data if isinstance(value, Mapping) else value
            places = {(name, *path): place for path, place in entry.places.items()}
            result = result.merged(Document({name: whole}, {**places, (name,): serving.place((name,))}))
    return result


def _parse(document: Document, model: type[E_], section: str, findings: list[Finding]) -> dict[str, E_]:
    entries: dict[str, E_] = {}
    for name, value in document.data.items():

        def found(path: tuple[str | int, ...], message: str) -> None:
            findings.append(Finding(str(document.place(path)), section, path, message))

        unit = "(a unit is named after it)"
        long = section == "checkpoints" and len(name) > 80
        taken = section == "serving" and TAKEN.fullmatch(name)
        faults = (
            (len(name) > LONGEST_NAME, f"a name has at most {LONGEST_NAME} characters {unit}, not {len(name)}"),
            (not NAME.fullmatch(name), f"a name is lower-case letters, digits, '.', '_' and '-' {unit}"),
            (long, "the name of a checkpoint has at most 80 characters"),
            (taken, "this name is taken: units or files of kimi-rig itself bear it"),
        )
        if message := next((message for wrong, message in faults if wrong), None):
            found((name,), message)
            continue
        try:
            entries[name] = model.model_validate(value)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                found((name, *place_of(problem, value)), words(problem, keys(model)))
    return entries


def _cross_check(catalog: Catalog, documents: Mapping[str, Document]) -> Iterator[Finding]:
    for name, configuration in catalog.serving.items():

        def finding(key: Iterable[str], message: str, name: str = name) -> Finding:
            path = (name, *key)
            return Finding(str(documents["serving"].place(path)), "serving", path, message)

        yield from _check_references(configuration, catalog, finding)
        yield from _check_parsers(configuration, finding)
        yield from _check_limits(configuration, catalog, finding)
        yield from _check_speculation(configuration, catalog, finding)
        for key in configuration.secrets:
            if key in OWN_KEYS or key in configuration.environment:
                yield finding(["secrets", key], f"is set by {OWN_KEYS.get(key, '`environment`')}, not here")
        for part in ("flags", "environment"):
            for key, value in getattr(configuration, part).items():
                if key in OWN_KEYS:
                    yield finding([part, key], f"is set by {OWN_KEYS[key]}, not here")
                elif key.lower().endswith("port") and str(value) == str(configuration.listen.port):
                    yield finding([part, key], f"{value} is the port of its API (`listen`): name another")
        for key, value in configuration.flags.items():
            if value is False and (why := refused_false(configuration.release, key)):
                yield finding(["flags", key], why)
        yield from _check_current(name, configuration, catalog, finding)
    for name, training in catalog.training.items():
        for keys_, message in training_faults(training, catalog.serving, catalog.checkpoints, catalog.trainers):
            yield Finding(str(documents["training"].place((name, *keys_))), "training", (name, *keys_), message)
    yield from _check_compared(catalog, documents["serving"])
    yield from _check_checkpoints(catalog, documents["checkpoints"])
    yield from _check_traps(catalog, documents["releases"])


def _check_traps(catalog: Catalog, document: Document) -> Iterator[Finding]:
    """A trap of a model that nobody has would concern no host, without a word."""
    known = {*catalog.checkpoints, *catalog.families}
    for name, release in catalog.releases.items():
        for number, trap in enumerate(release.known_bad):
            for model in set(trap.models) - known:
                path = (name, "known_bad", number, "models")
                message = f"there is no checkpoint or family {model}{nearest(model, known)}"
                yield Finding(str(document.place(path)), "releases", path, message)


def _check_compared(catalog: Catalog, document: Document) -> Iterator[Finding]:
    """Configurations of one target on the same GPUs are compared: one limit of running requests for all of them."""
    compared: dict[tuple[object, ...], dict[str, int | None]] = {}
    for name, entry in catalog.serving.items():
        if entry.accept.unequal_limit is None and not entry.listen.private:
            compared.setdefault((entry.target, *sorted(entry.gpus)), {})[name] = entry.max_running_requests
    for limits in compared.values():
        counted = Counter(limits.values())
        usual = max(counted, key=lambda limit: (counted[limit], limit is not None))
        like = next(name for name, limit in limits.items() if limit == usual)
        for name, limit in limits.items():
            if limit != usual:
                path = (name, "max_running_requests")
                message = (
                    f"is {_said(limit)}, but {_said(usual)} in {counted[usual]} configurations of the same target and "
                    f"GPUs (such as {like}): their figures could not be compared. Set one limit for all, or state the "
                    "reason in this entry: `accept: {unequal_limit: ...}`"
                )
                yield Finding(str(document.place(path)), "serving", path, message)


def _check_current(name: str, entry: Configuration, catalog: Catalog, finding: "Tell") -> Iterator[Finding]:
    """NAME-current is NAME on another release."""
    base = catalog.serving.get(name.removesuffix("-current"), entry)
    if entry.accept.differs_from_base is not None:
        return
    for key in Configuration.model_fields.keys() - {"description", "release", "accept"}:
        mine, its = getattr(entry, key), getattr(base, key)
        if mine != its:
            both = isinstance(mine, Mapping) and isinstance(its, Mapping)
            inner = [name for name in mine if its.get(name) != mine[name]][:1] if both else []
            yield finding(
                [key, *inner],
                f"differs from {name.removesuffix('-current')}, of which this is the variant on another release. Make "
                "both equal, rename this entry, or state the reason in it: `accept: {differs_from_base: ...}`",
            )


def _said(value: int | None) -> str:
    return "unset" if value is None else str(value)


def _check_checkpoints(catalog: Catalog, document: Document) -> Iterator[Finding]:
    entries = catalog.checkpoints
    wrong = [
        (name, "targets", f"there is no checkpoint {target}")
        for name, entry in entries.items()
        for target in entry.targets
        if target not in entries
    ]
    wrong += [
        (name, "family", f"there is no family {entry.family}{nearest(entry.family, catalog.families)}")
        for name, entry in entries.items()
        if entry.family is not None and entry.family not in catalog.families
    ]
    for name, other in overlapping({name: entry.path for name, entry in entries.items()}):
        where = f"lies in {entries[name].path}, and so does {other} ({entries[other].path})"
        wrong.append((name, "path", f"{where}: each checkpoint has a directory of its own"))
    for name, key, message in wrong:
        yield Finding(str(document.place((name, key))), "checkpoints", (name, key), message)


def _check_manifests(catalog: Catalog, document: Document, folder: Path) -> Iterator[Finding]:
    for name in catalog.checkpoints:
        place = folder / f"{name}.json"
        try:
            if place.is_file():
                Manifest.read(place)
        except RigctlError as error:
            message = f"{error}: remove it, and `make pin CHECKPOINT={name}` writes it anew"
            yield Finding(str(document.place((name,))), "checkpoints", (name,), message)


def _check_canaries(catalog: Catalog, document: Document, inventory: Path) -> Iterator[Finding]:
    for name, family in catalog.families.items():
        try:
            canary_prompts(family.canary, inventory)
        except RigctlError as error:
            yield Finding(str(document.place((name, "canary"))), "families", (name, "canary"), str(error))


def overlapping(paths: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Pairs of names, the later one first, whose paths are the same or one below the other."""
    for (one, path), (other, second) in itertools.combinations(paths.items(), 2):
        if f"{path}/".startswith(f"{second}/") or f"{second}/".startswith(f"{path}/"):
            yield other, one


Tell = Callable[[Iterable[str], str], Finding]


def _check_references(configuration: Configuration, catalog: Catalog, finding: Tell) -> Iterator[Finding]:
    if configuration.release not in catalog.releases:
        yield finding(["release"], f"there is no release {configuration.release}{_known(catalog.releases)}")
    wanted = [(["target"], configuration.target, "target")]
    if configuration.drafter is not None:
        wanted.append((["speculation", "drafter"], configuration.drafter, "drafter"))
    for key, name, role in wanted:
        checkpoint = catalog.checkpoints.get(name)
        if checkpoint is None:
            yield finding(key, f"there is no checkpoint {name}{_known(catalog.checkpoints)}")
        elif checkpoint.role != role:
            yield finding(key, f"{name} is a {checkpoint.role}, a {role} is needed")


def _check_parsers(configuration: Configuration, finding: Tell) -> Iterator[Finding]:
    """The release knows the parsers by these names, unless a flag brings one of the operator's own."""
    for kind in ("tool", "reasoning"):
        key = {"tool": "tool_call_parser", "reasoning": "reasoning_parser"}[kind]
        name, known = getattr(configuration, key), recorded_names(configuration.release, f"{kind}_parsers")
        own = f"{kind}-parser-plugin" in configuration.flags
        if name not in (None, "auto") and known is not None and name not in known and not own:
            yield finding([key], f"{configuration.release} has no {kind} parser {name}{nearest(name, known)}")


def _check_limits(configuration: Configuration, catalog: Catalog, finding: Tell) -> Iterator[Finding]:
    gpus = configuration.gpus
    if len(set(gpus)) != len(gpus):
        yield finding(["gpus"], f"a GPU is listed twice: {gpus}")
    release = catalog.releases.get(configuration.release)
    if release is not None and release.accelerator == "cpu" and gpus:
        yield finding(["gpus"], f"release {configuration.release} runs on the CPU, yet GPUs are listed")
    if release is not None and release.accelerator == "cuda" and len(gpus) % configuration.tensor_parallel:
        yield finding(["tensor_parallel"], f"{configuration.tensor_parallel} does not divide {len(gpus)} GPUs")
    if release is not None and release.accelerator == "cuda" and not gpus:
        yield finding(["gpus"], f"release {configuration.release} needs at least one GPU")


def _check_speculation(configuration: Configuration, catalog: Catalog, finding: Tell) -> Iterator[Finding]:
    """The method is one that drafter, target and release know."""
    speculation, release = configuration.speculation, catalog.releases.get(configuration.release)
    if speculation is None:
        return
    method, key = speculation.method, "speculation"
    drafter, target = catalog.checkpoints.get(speculation.drafter or ""), catalog.checkpoints.get(configuration.target)
    if drafter is not None and drafter.role == "drafter" and method != (drafter.method or DRAFTERS_DRAFT):
        yield finding(
            [key, "method"], f"is {method}, but {speculation.drafter} drafts by {drafter.method or DRAFTERS_DRAFT}"
        )
    if method == "mtp" and target is not None and target.heads.mtp is None:
        yield finding(
            [key, "method"],
            f"checkpoints.{configuration.target} names no head of its own to draft with: if its files have one, say so "
            "there (`heads: {mtp: {layers: 1}}`)",
        )
    if speculation.topk == 1 and speculation.draft_tokens not in (None, speculation.steps + 1):
        yield finding([key, "draft_tokens"], f"topk 1 forces steps + 1 = {speculation.steps + 1}")
    if release is None:
        return
    if (release.engine, method) not in FLAGS:
        yield finding([key, "method"], f"{release.engine} has no {method}")
        return
    if method == EXTRACTS and not configuration.listen.private:
        yield finding(["listen"], f"{method} writes down what it is asked: say `listen: {{private: true}}`")
    if release.engine == "sglang" and speculation.options:
        yield finding([key, "options"], "is for vLLM's --speculative-config; SGLang takes such as `flags`")
    if release.engine == "vllm" and speculation.topk != 1:
        yield finding([key, "topk"], "is SGLang's: vLLM drafts one chain")
    if speculation.topk != 1 and method in ("ngram", "dflash"):
        yield finding([key, "topk"], f"is for eagle3 and mtp: {method} drafts one chain")
    known, word = recorded_names(configuration.release, "methods"), FLAGS[release.engine, method].word
    if known is not None and word not in known:
        yield finding([key, "method"], f"{configuration.release} knows no {word}; it knows {', '.join(sorted(known))}")


@cache
def _record(release: str) -> Mapping[str, Any]:
    """What a release said of itself to `make release-add`; empty without a record."""
    try:
        found: dict[str, Any] = json.loads((ROOT / f"files/releases/{release}.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _recorded_options(release: str) -> Mapping[str, str] | None:
    """Flag -> default (repr) of a release's own parser; None without a record."""
    options: Mapping[str, str] | None = _record(release).get("options")
    return options


def recorded_names(release: str, what: str) -> frozenset[str] | None:
    """Names that a release knows (rigctl/engine_registry.py: methods, architectures, ...); None without a record."""
    names = _record(release).get("registry", {}).get(what)
    return None if names is None else frozenset(names)


def recorded_fraction(release: str) -> float | None:
    """Share of a card's memory that vLLM takes when nothing is said; None of SGLang, which decides by itself, and
    without a record."""
    said = (_recorded_options(release) or {}).get("--gpu-memory-utilization")
    return None if said is None else float(said)


def negative_form(release: str, flag: str) -> list[str]:
    """The words that turn a flag off: the parser's --no- form, or none where off is what leaving it out means.

    Of a release without a record the host asks the parser itself (`rigctl probe`), before it writes a unit.
    """
    options, negative = _recorded_options(release), f"--no-{flag}"
    return [negative] if options is None or negative in options else []


def refused_false(release: str, flag: str) -> str | None:
    """Why `flag: false` cannot be said to a release; None where it can."""
    options = _recorded_options(release)
    if options is None or f"--no-{flag}" in options or options.get(f"--{flag}") == "False":
        return None
    if f"--{flag}" not in options:
        return f"{release} has no flag --{flag}{nearest(flag, [name.lstrip('-') for name in options])}"
    return (
        f"false cannot be said to {release}: it has no --no-{flag}, and left out the flag is {options[f'--{flag}']}. "
        "Leave the key out, or give the value or flag that turns it off"
    )


def _known(entries: Mapping[str, Entry]) -> str:
    return f" (there are: {', '.join(sorted(entries))})" if entries else ""
