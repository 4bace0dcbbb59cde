"""Everything one host shall have, as pure data: from its inventory data, the catalogues and a few facts.

The deploy, the verification and the receipt read the same HostPlan, so nothing is written twice.
"""

import glob
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pyinfra.api.arguments import all_global_arguments
from pyinfra.api.connectors import get_all_connectors

from rig.catalog.defaults import Defaults
from rig.catalog.drafter_training import DrafterTraining
from rig.catalog.entries import (
    ROOT,
    Catalog,
    Checkpoint,
    Configuration,
    Locked,
    Package,
    Release,
    load_catalog,
    overlapping,
)
from rig.catalog.yaml_source import CatalogError
from rig.facts.host import HostFacts
from rig.host.cuda_toolkit import toolkit_for
from rig.host.settings import ACS_UNIT, HostSettings, with_host
from rig.host.situation import Workload
from rig.host.system_files import HostFileError, host_files
from rig.host.topology import Decision, TopologyError, decide
from rig.plan.command_lines import Locations
from rig.plan.edge import Edge, EdgeData, edge_of
from rigctl.contract import layout
from rigctl.contract.fields import HostPath, Text
from rigctl.contract.limits import Limits
from rigctl.contract.order import faults, nearest
from rigctl.contract.sources import HubSource
from rigctl.contract.speculation import EXTRACTS

# The interpreter of each supported distribution (os-release ID-VERSION_ID), known before anything is installed.
DISTRIBUTION_PYTHON = {"debian-12": "3.11", "ubuntu-24.04": "3.12"}


NCCL = "nvidia-nccl-cu"
"""NCCL's package in a lock; CUDA's major version follows."""

HUB = "https://huggingface.co"
"""Where a repository lies that names no endpoint (huggingface_hub's default)."""

COMMAND_KEYS = {"bench_sweep", "bench_configurations", "rollback_to", "rollback_again", "train"}
"""Read by tasks/benchmark.py, rollback.py and train.py, not part of a plan."""


def _service_user(name: str) -> str:
    if name in ("root", layout.BUILDER, layout.EDGE_USER) or not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", name):
        raise ValueError(
            "the name of a system user of its own, not root's or another of kimi-rig's: at most 31 lower-case letters, "
            "digits, '_' and '-'"
        )
    return name


class HostData(BaseModel):
    """The host data of inventory/group_data/all.py, typed; see `refuse_unknown` for all others."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    ml_env: HostPath
    wheels: HostPath | None = None
    models: HostPath
    drafters: HostPath
    training: HostPath = "/data/training"
    trainings: list[str] = []
    configurations: list[str] | None = None
    catalogue_overlay: Text | None = None
    base_packages: list[Package]
    service_user: Annotated[str, AfterValidator(_service_user)]
    enable_at_boot: str | list[str] | None = None
    restart: Literal["never", "when-idle", "now"] = "never"
    supervision: Limits = Limits()
    api_key_file: Text | None = None
    edge: EdgeData | None = None
    hub_token_file: Text | None = None
    host_overrides: dict[str, str | None] = {}
    reboot: Literal["no", "yes"] = "no"
    driver_packages: list[str] = []
    driver_keyring: dict[str, list[str]] = {}
    driver_upgrade: bool = False
    cuda_home: HostPath | None = None
    probes: list[str] = []
    kernel_store: Annotated[str, Field(pattern=r"^([\w.@-]+:)?/[\w./-]+$")] | None = None
    accept_known_bad: list[str] = []
    roll_forward: Literal["no", "yes"] = "no"

    @property
    def at_boot(self) -> list[str]:
        """The configurations that start with the machine."""
        named = self.enable_at_boot or []
        return [named] if isinstance(named, str) else named


@dataclass(frozen=True)
class Built:
    """One environment: <ml_env>/<release>/<digest>, where the digest covers all that goes in."""

    name: str
    release: Locked
    python: str
    lock: str
    path: str

    @property
    def interpreter(self) -> str:
        return f"{self.path}/bin/python"

    @property
    def lock_on_host(self) -> str:
        return f"{layout.LOCKS}/{Path(self.lock).name}"

    @property
    def series_on_host(self) -> str | None:
        """Directory of the patch series on the host; None for a release that needs none."""
        return f"{layout.PATCHES}/{self.name}" if self.release.patches else None


@dataclass(frozen=True)
class Environment(Built):
    """The environment of an engine."""

    release: Release
    carries_nvcc: bool = False
    """The lock brings a CUDA compiler."""
    nccl: str | None = None
    """Version of NCCL in the lock; None where there is none."""
    cuda_home: str | None = None
    """The CUDA toolkit it compiles with at serve time, where one is on the host."""


@dataclass(frozen=True, eq=False)
class HostPlan:
    """What a host shall have. Paths are absolute paths on the host.

    Never changed, and equal to itself alone: what is made of a plan is kept by it (rig/artifacts/units.py).
    """

    data: HostData
    distribution: str
    settings: HostSettings
    serving: Mapping[str, Configuration]
    environments: Mapping[str, Environment]
    checkpoints: Mapping[str, Checkpoint]
    checkpoint_paths: Mapping[str, str]
    facts: HostFacts = field(default_factory=HostFacts, repr=False)
    decision: Decision = field(default=Decision((), (), ()), repr=False)
    edge: Edge | None = None
    """What others reach; None where every configuration listens on loopback and the host's data has no `edge`."""
    defaults: Mapping[str, Defaults] = field(default_factory=dict)
    """By configuration: what its entry left to the family and to the checkpoints."""
    derived_from: Mapping[str, str] = field(default_factory=dict)
    """Drafters that exist for a benchmark only -> the checkpoint whose files they are."""
    trainings: Mapping[str, DrafterTraining] = field(default_factory=dict)
    trainers: Mapping[str, Built] = field(default_factory=dict)
    """Environments in which drafters are trained, by release."""

    @property
    def built(self) -> Mapping[str, Built]:
        """Every environment: those of engines, then those of trainers."""
        return {**self.environments, **self.trainers}

    @property
    def packages(self) -> list[str]:
        """System packages of the host and of the engine releases it gets."""
        engines = (name for env in self.built.values() for name in env.release.system_packages)
        # setpci, for the bridges above the cards.
        host = {"pciutils"} if ACS_UNIT in self.settings.boot_units else set()
        kernels = {name for env in self.environments.values() for name in kernel_packages(env.release)}
        return sorted({*self.data.base_packages, *engines, *host, *kernels})

    @property
    def secrets(self) -> dict[str, str]:
        """Secrets that the host keeps as they are: name -> the operator's file. Of keys of the edge it has digests."""
        keys: dict[str, str | None] = {"hub-token": self.data.hub_token_file}
        if not all(map(self.behind_edge, self.serving.values())):
            keys["api-key"] = self.data.api_key_file
        for name, entry in self.serving.items():
            keys |= {f"{name}.{variable}": file for variable, file in entry.secrets.items()}
        return {name: file for name, file in sorted(keys.items()) if file is not None}

    def behind_edge(self, configuration: Configuration) -> bool:
        """Whether clients reach it through the edge: its key is the host's own then."""
        return self.edge is not None and not configuration.listen.private and self.edge.before(configuration)

    def locations(self, configuration: Configuration) -> Locations:
        """The paths a configuration's command line names."""
        return Locations(
            python=self.environments[configuration.release].interpreter,
            target=self.checkpoint_paths[configuration.target],
            drafter=self._drafter(configuration.drafter, configuration.release) if configuration.drafter else None,
            staging=f"{self.data.training}/staging/{configuration.target}" if _extracts(configuration) else None,
        )

    def workload(self, configuration: Configuration) -> Workload:
        """What a configuration brings to the policy: its cards, its ranks, its release's NCCL."""
        environment = self.environments[configuration.release]
        return workload_of(configuration, environment.release, environment.nccl)

    def decision_of(self, configuration: Configuration) -> Decision:
        """What the policy decides for this configuration's cards, ranks and NCCL."""
        return decide(self.facts, self.data.host_overrides, self.workload(configuration))

    @property
    def decisions(self) -> dict[str, Decision]:
        """`decision_of` each configuration."""
        return {name: self.decision_of(entry) for name, entry in self.serving.items()}

    def settings_of(self, configuration: Configuration) -> HostSettings:
        """The settings of `decision_of`; those of the plan where the host could not be read."""
        return self.decision_of(configuration).host if self.decision.cards else self.settings

    def _drafter(self, name: str, release: str) -> str:
        return overlay_path(name, release) if writes_ids(self.checkpoints[name]) else self.checkpoint_paths[name]


def _extracts(configuration: Configuration) -> bool:
    return configuration.speculation is not None and configuration.speculation.method == EXTRACTS


def workload_of(configuration: Configuration, release: Release, nccl: str | None) -> Workload:
    """A configuration without cards gets what all cards would."""
    cards = tuple(configuration.gpus) or None
    variables = {**release.environment, **configuration.environment}
    return Workload(cards, configuration.tensor_parallel if cards else None, nccl, variables)


def recorded_workloads(catalog: Catalog) -> dict[str, Workload]:
    """The workloads of all configurations, for recorded facts of a host that has no data."""
    found = {}
    for name, entry in catalog.serving.items():
        release = catalog.releases[entry.release]
        lock = release.lock.format(python=release.python[0].replace(".", ""))
        found[name] = workload_of(entry, release, _locked(lock, NCCL))
    return found


def writes_ids(entry: Checkpoint) -> bool:
    """Whether units read a drafter through an overlay, where its layer ids stand as their engine reads them."""
    return entry.training.layer_ids is not None and not entry.training.accept_mismatch


def overlay_path(drafter: str, release: str) -> str:
    """The overlay of a drafter for an engine release."""
    return f"{layout.OVERLAYS}/{drafter}/{release}"


def plan_from_facts(data: Mapping[str, Any], facts: HostFacts) -> HostPlan:
    """The plan of a host whose facts are known: its settings come from the topology policy. Raises CatalogError."""
    try:
        decision = decide(facts, _host_data(data).host_overrides)
        host_files(decision.host, facts)  # a value that must not stand in one is refused with the plan
    except TopologyError as error:
        raise CatalogError(f"host data {error}") from None
    except HostFileError as error:
        raise CatalogError(f"host data host_overrides: {error}") from None
    # The settings of engines depend on the configuration.
    plan = host_plan(data, facts.distribution, replace(decision.host, engine_flags={}, memory_fraction={}))
    plan = replace(plan, facts=facts, decision=decision, settings=decision.host)
    each = [plan.decision_of(entry) for entry in plan.serving.values() if entry.gpus]
    needed = {one.key for of in each for one in of.settings if one.needed}
    settings = tuple(replace(one, needed=one.key in needed) for one in decision.settings)
    plan = replace(plan, decision=replace(decision, settings=settings))
    serving = {
        name: with_host(entry, plan.environments[entry.release].release.engine, plan.settings_of(entry))
        for name, entry in plan.serving.items()
    }
    named = plan.data.cuda_home
    environments = {
        name: replace(one, cuda_home=toolkit_for(one.release, facts.toolkits, named, carries_nvcc=one.carries_nvcc))
        for name, one in plan.environments.items()
    }
    return replace(plan, serving=serving, environments=environments)


def questions(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the facts script is asked of this host beyond itself (rig/facts/remote_script.py). Raises CatalogError."""
    host = _host_data(data)
    catalog = load_catalog(host.catalogue_overlay)
    used = _chosen(host, catalog).values()
    names = {name for one in used for name in one.used}
    folders = sorted(_checkpoint_path(catalog.checkpoints[name], host) for name in names)
    paths = [host.ml_env, host.models, host.drafters, *([host.training] if host.trainings else [])]
    # A checkpoint may lie elsewhere: its space is then asked of its own folder.
    elsewhere = [path for path in folders if not any(path.startswith(f"{above}/") for above in paths)]
    hubs: dict[str, list[str]] = {}
    for name in names:
        source = catalog.checkpoints[name].source
        if isinstance(source, HubSource) and source.revision is not None:
            folder = _checkpoint_path(catalog.checkpoints[name], host)
            hubs.setdefault(source.endpoint or HUB, []).append(folder)
    return {
        "disk": [[kind, pattern] for kind, pattern in _ours_on_disk(host, folders)],
        "paths": [*paths, *elsewhere],
        "models": folders,
        "environments": host.ml_env,
        "toolkits": [host.cuda_home] if host.cuda_home else [],
        "probes": host.probes,
        "hubs": {url: sorted(of) for url, of in sorted(hubs.items())},
        "driver_source": next((keyring[0] for keyring in host.driver_keyring.values() if keyring), None),
    }


def _ours_on_disk(host: HostData, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Kind and pattern of what of ours takes room; a file of several names counts with the first."""
    base = glob.escape(host.ml_env)
    yield from (("checkpoint", glob.escape(path)) for path in folders)
    parents = sorted({host.models, host.drafters, *(path.rpartition("/")[0] for path in folders)})
    yield from (("staging", f"{glob.escape(parent)}/.*.partial") for parent in parents)
    yield "current", f"{base}/*/current"
    yield from (("work", f"{base}/kernels/{name}") for name in ("work", "ccache"))
    yield "kernels", f"{base}/kernels/store/*"
    yield "tools", f"{base}/toolchain/*"
    yield "benchmark", f"{base}/aiperf/*"
    yield "environment", f"{base}/*/{'[0-9a-f]' * 12}"
    yield "wheels", f"{base}/.cache"
    yield "cache", f"{layout.CACHE}/*/*"
    yield "log", f"{layout.LOGS}/*"
    yield "states", layout.STATES
    yield "benchmark", f"{layout.STATE}/bench"
    if host.trainings:
        yield "training", f"{glob.escape(host.training)}/*"


def host_plan(data: Mapping[str, Any], distribution: str, settings: HostSettings) -> HostPlan:
    """Build the plan of one host.

    data: the host's inventory data. distribution: "debian-12", "ubuntu-24.04".
    Raises CatalogError for wrong data, an unsupported distribution or a configuration that does not exist.
    """
    host = _host_data(data)
    catalog = load_catalog(host.catalogue_overlay)
    edge, serving = reached(host, _chosen(host, catalog))
    python = _python_of(distribution)
    names = sorted({configuration.target for configuration in serving.values()})
    trainings = {name: catalog.training[name] for name in host.trainings}
    drafters = {one.drafter for one in serving.values() if one.drafter}
    names += sorted(drafters.union(*(one.drafters for one in trainings.values())))
    checkpoints = {name: catalog.checkpoints[name] for name in names}
    paths = {name: _checkpoint_path(entry, host) for name, entry in checkpoints.items()}
    for name, other in overlapping(paths):
        where = f"{name} would lie at {paths[name]}, {other} at {paths[other]}"
        raise CatalogError(f"host data models, drafters: checkpoint {where}: each needs a directory of its own")
    ours = {"ml_env": host.ml_env, "models": host.models, "drafters": host.drafters}
    _refuse_own_places({**ours, **paths, **({"training": host.training} if trainings else {})})
    releases = sorted({configuration.release for configuration in serving.values()})
    plan = HostPlan(
        data=host,
        distribution=distribution,
        settings=settings,
        serving={n: with_host(c, catalog.releases[c.release].engine, settings) for n, c in serving.items()},
        environments={name: _environment(name, catalog.releases[name], python, host) for name in releases},
        checkpoints=checkpoints,
        checkpoint_paths=paths,
        edge=edge,
        defaults=catalog.defaults,
        trainings=trainings,
        trainers={one.trainer: _trainer(one.trainer, catalog, python, host) for one in trainings.values()},
    )
    for name, training in trainings.items():
        answers = plan.serving[training.answers.configuration]
        if not answers.listen.private and (plan.behind_edge(answers) or host.api_key_file):
            raise CatalogError(
                f"training.{name}.answers: {training.answers.configuration} asks for a key here, and the client sends "
                "none: name a configuration with `listen: {private: true}` that extends it"
            )
    return plan


def _refuse_own_places(paths: Mapping[str, str]) -> None:
    """Raises CatalogError for a path in a directory that an uninstall removes whole."""
    for what, path in paths.items():
        for ours in (layout.STATE, layout.ETC, layout.HOSTKIT, layout.CACHE, layout.LOGS, layout.RUNTIME):
            if f"{path}/".startswith(f"{ours}/"):
                raise CatalogError(
                    f"{what} is {path}: {ours} is kimi-rig's own, and an uninstall deletes it; name another directory"
                )


def refuse_unknown(data: Mapping[str, Any]) -> None:
    """Raises CatalogError for keys that neither we nor pyinfra read, which would silently do nothing, and for those of
    pyinfra's that change how every command runs.
    """
    if refused := sorted(data.keys() & pyinfra_arguments() - ARGUMENTS):
        raise CatalogError(
            f"host data: {', '.join(refused)}: every verb reaches root by login or by `_sudo: True`; pyinfra's other "
            "arguments break or skip commands, such as those of several lines (pyinfra-dev/pyinfra#1699). Leave it out"
        )
    known = {*HostData.model_fields, *COMMAND_KEYS, *pyinfra_keys()}
    if unknown := sorted(data.keys() - known):
        told = "; ".join(f"there is no key {key}{nearest(key, known)}" for key in unknown)
        raise CatalogError(f"host data (inventory/group_data/all.py lists it): {told}")


ARGUMENTS = frozenset({"_sudo", "_env", "_temp_dir", "_parallel"})
"""pyinfra's global arguments that host data may have."""


@cache
def pyinfra_arguments() -> frozenset[str]:
    """pyinfra's global arguments: how a command becomes another user, where it runs, whether its failure counts."""
    return frozenset(key for key, _ in all_global_arguments() if key.startswith("_"))


@cache
def pyinfra_keys() -> frozenset[str]:
    """Keys of host data that pyinfra reads: its connectors' (ssh_user, ...) and its global arguments (_sudo, ...)."""
    connectors = get_all_connectors().values()  # type: ignore[no-untyped-call]  # pyinfra leaves it untyped
    found = {key for connector in connectors for key in get_type_hints(connector.data_cls)}
    return frozenset(found | pyinfra_arguments())


def _host_data(data: Mapping[str, Any]) -> HostData:
    refuse_unknown(data)
    known = {key: value for key, value in data.items() if key in HostData.model_fields}
    try:
        return HostData.model_validate(known)
    except ValidationError as error:
        findings = "; ".join(faults(error, HostData, known))
        raise CatalogError(f"host data (inventory/group_data/all.py lists it): {findings}") from None


def _chosen(host: HostData, catalog: Catalog) -> dict[str, Configuration]:
    tried = [name for name, entry in catalog.serving.items() if entry.unproved is None and not entry.listen.private]
    names = tried if host.configurations is None else host.configurations
    if missing := [name for name in host.trainings if name not in catalog.training]:
        there = ", ".join(catalog.training) or "none"
        raise CatalogError(f"host data trainings: {', '.join(missing)} is not in training.yaml (there are: {there})")
    asked = (one for name in host.trainings for one in catalog.training[name].configurations)
    names = list(dict.fromkeys([*names, *asked]))
    unknown = [name for name in names if name not in catalog.serving]
    for boot in host.at_boot:
        if boot not in names:
            raise CatalogError(f"host data enable_at_boot: {boot} is none of this host's configurations")
    if unknown:
        there = ", ".join(catalog.serving)
        raise CatalogError(
            f"host data configurations: {', '.join(unknown)} is not in serving.yaml (there are: {there})"
        )
    for one, other in itertools.combinations([name for name in host.at_boot if name in catalog.serving], 2):
        if claimed := both_claim(catalog.serving[one], catalog.serving[other]):
            raise CatalogError(
                f"host data enable_at_boot: {one} and {other} exclude each other, both claim {claimed}: name one, "
                "or give one another port or other GPUs"
            )
    return {name: catalog.serving[name] for name in names}


def both_claim(one: Configuration, other: Configuration) -> str | None:
    """What two configurations claim alike, so that they cannot run beside each other; None where nothing is."""
    if shared := sorted(set(one.gpus) & set(other.gpus)):
        return f"GPU {', '.join(map(str, shared))}"
    return f"port {one.listen.port}" if one.listen.port == other.listen.port else None


def chosen_serving(data: Mapping[str, Any]) -> tuple[HostData, dict[str, Configuration], Mapping[str, Checkpoint]]:
    """The part of a plan that needs no host: its data, configurations and all checkpoints. Raises CatalogError."""
    host = _host_data(data)
    catalog = load_catalog(host.catalogue_overlay)
    return host, _chosen(host, catalog), catalog.checkpoints


def reached(host: HostData, serving: Mapping[str, Configuration]) -> tuple[Edge | None, dict[str, Configuration]]:
    """The edge of a host, and its configurations as their engines listen. Raises CatalogError."""
    check_listening(host, serving)
    public = {name: entry for name, entry in serving.items() if not entry.listen.private}
    edge, moved = edge_of(host.edge, host.api_key_file, public)
    return edge, {name: moved.get(name, entry) for name, entry in serving.items()}


def check_listening(host: HostData, serving: Mapping[str, Configuration]) -> None:
    """Raises CatalogError for a configuration that others can reach without an API key."""
    for name, configuration in serving.items():
        guarded = host.edge or host.api_key_file or configuration.listen.open_without_key
        if not configuration.listen.loopback and not guarded:
            raise CatalogError(
                f"serving.{name} listens on {configuration.listen.host}, which others can reach: "
                "set api_key_file in the host's data, listen on 127.0.0.1, or say open_without_key: true"
            )


def _python_of(distribution: str) -> str:
    if distribution not in DISTRIBUTION_PYTHON:
        supported = ", ".join(DISTRIBUTION_PYTHON)
        raise CatalogError(f"the host runs {distribution or 'an unknown system'}; supported are {supported}")
    return DISTRIBUTION_PYTHON[distribution]


def _trainer(name: str, catalog: Catalog, python: str, host: HostData) -> Built:
    release = catalog.trainers[name]
    lock, digest = _lock_of(name, release, python)
    return Built(name, release, python, lock, f"{host.ml_env}/{name}/{digest}")


def _lock_of(name: str, release: Locked, python: str) -> tuple[str, str]:
    """The lock of a release for a Python, and the digest of what its environment is made from."""
    if python not in release.python:
        raise CatalogError(f"releases.{name} has no lock for Python {python}, which is this host's")
    lock = release.lock.format(python=python.replace(".", ""))
    return lock, _environment_digest(lock, python, release.patches)


def _environment(name: str, release: Release, python: str, host: HostData) -> Environment:
    lock, digest = _lock_of(name, release, python)
    if release.kernel is not None:
        tools = release.kernel.toolchain.lock.format(python=python.replace(".", ""))
        list(_inputs(tools, release.kernel.patches))
    carries_nvcc, nccl = (_locked(lock, package) for package in ("nvidia-cuda-nvcc", NCCL))
    path = f"{host.ml_env}/{name}/{digest}"
    return Environment(name, release, python, lock, path, carries_nvcc is not None, nccl)


@cache
def _locked(lock: str, package: str) -> str | None:
    """Version of a package in a lock; of CUDA's packages any major version's."""
    found = re.search(rf"^{package}\d*==([\w.]+)", (ROOT / lock).read_text(), re.M)
    return found[1] if found else None


@cache
def _environment_digest(lock: str, python: str, patches: str | None) -> str:
    digest = hashlib.sha256(python.encode())
    for path in _inputs(lock, patches):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _inputs(lock: str, patches: str | None) -> Iterator[Path]:
    if not (ROOT / lock).is_file():
        raise CatalogError(f"{lock} does not exist; `make release-add` writes it with recipe and record")
    yield ROOT / lock
    if patches is not None:
        series = sorted((ROOT / patches).glob("*.patch"))
        if not series:
            raise CatalogError(f"there is no patch in {patches}, which a release names")
        yield from series


def _checkpoint_path(checkpoint: Checkpoint, host: HostData) -> str:
    return checkpoint.path.format(models=host.models, drafters=host.drafters)


def kernel_packages(release: Release) -> list[str]:
    """Packages that building a release's kernel needs, or compiling one while it serves."""
    if release.kernel is None:
        return []
    if release.kernel.mode == "wheel":
        return ["g++"]
    return ["g++", "binutils", "ccache", "git", "python3-dev", *release.kernel.system_packages]


def canonical_digest(value: Any) -> str:
    """sha256 of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
