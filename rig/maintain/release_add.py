"""`kimi-rig release-add`: lock an engine release, install it here, ask it, compare it, and write its block.

The environment is built as on a host (rigctl environment build), without a GPU, in a scratch directory. What the
release says of itself (flags with defaults, metrics) is kept in files/releases/, so that the next one can be compared
without installing this one again. Nothing is written unless the release was locked, installed and answered.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from rig.artifacts.engine_inputs import needed
from rig.catalog.entries import (
    ROOT,
    Configuration,
    Release,
    forget_catalogs,
    inventory_directory,
    load_catalog,
    overlays,
)
from rig.cli.arguments import FAILED, verb
from rig.maintain.locks import LOCKS, Recipe, read_recipes, write_lock
from rig.plan.command_lines import Locations, command_line
from rigctl import builder, engine_registry
from rigctl.contract.comparison import version_tuple
from rigctl.contract.environment_build import EnvironmentBuild, Index
from rigctl.engines import environment, probes
from rigctl.engines.drift import read_lock
from rigctl.engines.installed import site_packages
from rigctl.errors import RigctlError
from rigctl.whole_files import write_whole

FACTS = ROOT / "files" / "releases"
RECIPES = LOCKS / "recipes.yaml"
NEEDED_GB = {"cuda": 25, "cpu": 6}
UNSTABLE = re.compile(" at 0x|rigctl-probe-")
LONGEST = 200

# CUDA release notes, "CUDA Toolkit and Corresponding Driver Versions": minor versions within one major are compatible,
# so the oldest driver of the minor the wheels are built for is asked, not more.
DRIVER_OF_CUDA = {"12.6": "560", "12.8": "570", "12.9": "575", "13.0": "580", "13.1": "590"}


class ReleaseError(RigctlError):
    """A release that cannot be added; the message says why and what to do."""


@dataclass(frozen=True)
class Facts:
    """What an installed engine says of itself: flag -> default as its parser has it; names of its metrics; what its
    registry knows by name (rigctl/engine_registry.py)."""

    options: Mapping[str, str]
    metrics: Sequence[str]
    registry: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Facts":
        return cls(answer["options"], answer["metrics"], answer["registry"])

    @classmethod
    def read(cls, release: str, folder: Path | None = None) -> "Facts | None":
        """The recorded facts of a release; None when there are none."""
        path = (folder or FACTS) / f"{release}.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def text(self) -> str:
        """As recorded, without defaults that differ each time: addresses, the probe's own directory."""
        options = {flag: default for flag, default in sorted(self.options.items()) if not UNSTABLE.search(default)}
        registry = {what: sorted(names) for what, names in self.registry.items()}
        return json.dumps({"options": options, "metrics": sorted(self.metrics), "registry": registry}, indent=1) + "\n"


def differences(old: Facts, new: Facts) -> list[str]:
    """What changed from one release to the next, one line a flag or metric."""
    gone, come = sorted(old.options.keys() - new.options.keys()), sorted(new.options.keys() - old.options.keys())
    changed = [
        flag
        for flag in sorted(old.options.keys() & new.options.keys())
        if old.options[flag] != new.options[flag] and not UNSTABLE.search(old.options[flag] + new.options[flag])
    ]
    lines = [f"flag gone: {flag}" for flag in gone]
    lines += [f"flag new: {flag} (default {new.options[flag]})" for flag in come]
    lines += [f"default changed: {flag}: {_change(old.options[flag], new.options[flag])}" for flag in changed]
    lists = {"metric": (old.metrics, new.metrics)}
    lists |= {what.replace("_", " "): (old.registry[what], new.registry.get(what, [])) for what in old.registry}
    for what, (before, after) in lists.items():
        lines += [f"{what} gone: {name}" for name in sorted(set(before) - set(after))]
        lines += [f"{what} new: {name}" for name in sorted(set(after) - set(before))]
    return lines


def _change(old: str, new: str) -> str:
    """From what to what; of whole configurations only the parts that differ."""
    if len(old) + len(new) < LONGEST:
        return f"{old} -> {new}"
    before, after = old.split(", "), new.split(", ")
    gone, come = ([part for part in one if part not in other] for one, other in ((before, after), (after, before)))
    return f"{', '.join(gone) or 'nothing'} -> {', '.join(come) or 'nothing'}"


def newest(package: str, releases: Mapping[str, Release]) -> str:
    """The catalogue's newest release of a package. Raises ReleaseError when there is none to take after."""
    mine = [name for name, release in releases.items() if release.package == package]
    if not mine:
        known = ", ".join(sorted({release.package for release in releases.values()}))
        raise ReleaseError(f"releases.yaml has no release of {package} to take after (it has: {known})")
    return max(mine, key=lambda name: [int(part) for part in re.findall(r"\d+", releases[name].version)])


def configurations_like(release: str) -> dict[str, Configuration]:
    """Configurations that use releases of the same package, also those of overlays ("overlay:name")."""
    found: dict[str, Configuration] = {}
    for overlay in overlays(inventory_directory()):
        catalog = load_catalog(overlay)
        for name, entry in catalog.serving.items():
            if catalog.releases[entry.release].package == catalog.releases[release].package:
                found[f"{overlay.removesuffix('.yaml')}:{name}" if overlay else name] = entry
    return found


def block(name: str, version: str, like: Mapping[str, Any], recipe: Recipe, pythons: Sequence[str]) -> str:
    """The release's block of releases.yaml: the newest one's, without its patches, and with what its own lock says."""
    entry = {key: value for key, value in like.items() if key not in ("patches", "known_bad", "rate_counts_bonus")}
    entry |= {"version": version, "lock": f"files/locks/{name}-cp{{python}}.txt", "python": list(pythons)}
    if entry.get("accelerator", "cuda") == "cuda":
        entry |= needs_of((LOCKS / recipe.file_name).read_text(), recipe.platform)
    text = yaml.safe_dump({name: entry}, sort_keys=False, default_flow_style=None, width=100)
    return f"\n{text}"


def needs_of(lock: str, platform: str) -> dict[str, str]:
    """Least driver, CUDA and glibc, by the locked CUDA runtime and the platform that was locked for."""
    needs: dict[str, str] = {}
    pinned = read_lock(lock)
    runtimes = [pinned[key] for key in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12") if key in pinned]
    if runtimes:
        cuda = ".".join(runtimes[0].split(".")[:2])
        fitting = [minor for minor in DRIVER_OF_CUDA if version_tuple(minor) <= version_tuple(cuda)]
        same = [minor for minor in fitting if minor.partition(".")[0] == cuda.partition(".")[0]]
        if same:
            needs |= {"minimum_driver": DRIVER_OF_CUDA[max(same, key=version_tuple)], "minimum_cuda": cuda}
    if match := re.search(r"manylinux_(\d+)_(\d+)$", platform):
        needs["minimum_glibc"] = f"{match[1]}.{match[2]}"
    return needs


def recipe_line(name: str, package: str, version: str, like: str) -> str:
    """The new release's entry of recipes.yaml: the newest one's, with another version."""
    entry = yaml.safe_load(RECIPES.read_text())["releases"].get(like, {})
    kept = {key: value for key, value in entry.items() if key != "until"}
    packages = [f"{package}=={version}" if one.startswith(f"{package}==") else one for one in entry.get("packages", ())]
    text = yaml.safe_dump(
        {name: {**kept, "packages": packages or [f"{package}=={version}"]}},
        sort_keys=False,
        width=100,
        default_flow_style=None,
    )
    return "".join(f"  {line}\n" for line in text.splitlines())


@contextmanager
def all_or_nothing(*paths: Path) -> Iterator[None]:
    """The files are as they were when anything fails inside."""
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)
        raise


def installed(lock: Path, python: str, release: Mapping[str, Any], scratch: Path, cache: Path) -> Path:
    """An environment of the lock, built as on a host. Raises RigctlError, ReleaseError."""
    needed = NEEDED_GB[release.get("accelerator", "cuda")]
    if (free := shutil.disk_usage(scratch).free / 1e9) < needed:
        raise ReleaseError(f"{scratch}: {free:.0f} GB free, {needed} needed; set TMPDIR to a larger disk")
    patches = ROOT / release["patches"] if release.get("patches") else None
    path = scratch / "environment"
    index = Index.model_validate(release["index"]) if release.get("index") else None
    order = EnvironmentBuild(path=path, python=python, lock=lock, patches=patches, cache=cache, index=index)
    environment.build(order)
    return path


def ask(
    path: Path, engine: str, commands: Sequence[Sequence[str]] = (), features: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything an installed engine can be asked without a GPU."""
    answer = probes.ask(path, engine, commands, features=features, options=True)
    answer["metrics"] = probes.metric_names(site_packages(path), engine)
    answer["registry"] = vars(engine_registry.read(path, engine))
    return answer


def add(package: str, version: str, cache: Path | None) -> int:
    """Add one release; the exit code."""
    catalog = load_catalog()
    name = f"{package}-{version}"
    if name in catalog.releases:
        raise ReleaseError(f"{name} is in releases.yaml already; --record asks it again")
    if not re.fullmatch(r"\d+(\.\d+)*(\.?(post|rc|dev)\d+)?", version):
        raise ReleaseError(f"{version} is no version of a release, such as 0.34.0")
    like = newest(package, catalog.releases)
    catalogue = inventory_directory() / "releases.yaml"
    raw = yaml.safe_load(catalogue.read_text())[like]
    locks = [LOCKS / f"{name}-cp{python.replace('.', '')}.txt" for python in raw["python"]]
    with all_or_nothing(RECIPES, catalogue, FACTS / f"{name}.json", *locks):
        if name not in yaml.safe_load(RECIPES.read_text())["releases"]:
            write_whole(RECIPES, RECIPES.read_text().rstrip("\n") + "\n" + recipe_line(name, package, version, like))
        recipes = [recipe for recipe in read_recipes() if recipe.release == name]
        for recipe in recipes:
            print(
                f"{write_lock(recipe).name}: {len(read_lock((LOCKS / recipe.file_name).read_text()))} packages",
                flush=True,
            )
        chosen = _recipe_of_this_machine(recipes)
        new = block(name, version, raw, chosen, [recipe.python for recipe in recipes])
        write_whole(catalogue, catalogue.read_text().rstrip("\n") + "\n" + new)
        forget_catalogs()
        release = load_catalog().releases[name]
        entries = configurations_like(like)
        at = Locations("/env/bin/python", "/models/target", "/models/drafter")
        commands = [command_line(entry, release, at, drain_seconds=60) for entry in entries.values()]
        features = sorted(needed(entries.values(), load_catalog().checkpoints))
        with _scratch(cache) as (scratch, kept):
            path = installed(LOCKS / chosen.file_name, chosen.python, yaml.safe_load(new)[name], scratch, kept)
            answer = ask(path, release.engine, commands, features)
        FACTS.mkdir(exist_ok=True)
        (FACTS / f"{name}.json").write_text(Facts.of(answer).text())
    refused = list(report(name, like, answer, entries, release))
    print(f"written: {', '.join(path.name for path in (catalogue, RECIPES, *locks))}")
    print("read the block over: minimum driver, known_bad and harmless_log are for a person to check")
    return FAILED if refused else 0


def report(
    name: str, like: str, answer: Mapping[str, Any], entries: Mapping[str, Configuration], release: Release
) -> Iterator[str]:
    """Print what the release says; yields what is refused."""
    for feature in sorted({*release.features, *needed(entries.values(), load_catalog().checkpoints)}):
        verdict = answer["features"][feature]
        print(f"feature {feature}: {'yes' if verdict['ok'] else 'NO: ' + verdict['detail']}")
        if not verdict["ok"]:
            yield feature
    for configuration, verdict in zip(entries, answer["commands"], strict=True):
        print(f"configuration {configuration}: {'accepted' if verdict['ok'] else 'REFUSED: ' + verdict['detail']}")
        if not verdict["ok"]:
            yield configuration
    old = Facts.read(like)
    if old is None:
        print(f"nothing is recorded of {like}, so it is not compared: `kimi-rig release-add --record {like}`")
        return
    changed = differences(old, Facts.of(answer))
    print(f"{name} against {like}: {len(changed)} differences")
    for line in changed:
        print(f"  {line}")


def record(names: Iterable[str], cache: Path | None) -> int:
    """Write down what releases of the catalogue say of themselves."""
    catalog = load_catalog()
    for name in names:
        if name not in catalog.releases:
            raise ReleaseError(
                f"there is no release {name} in releases.yaml (there are: {', '.join(catalog.releases)})"
            )
        release = catalog.releases[name]
        recipe = _recipe_of_this_machine([one for one in read_recipes() if one.release == name])
        raw = yaml.safe_load((inventory_directory() / "releases.yaml").read_text())[name]
        with _scratch(cache) as (scratch, kept):
            path = installed(LOCKS / recipe.file_name, recipe.python, raw, scratch, kept)
            text = Facts.of(ask(path, release.engine)).text()
        FACTS.mkdir(exist_ok=True)
        (FACTS / f"{name}.json").write_text(text)
        print(f"{name}: recorded")
    return 0


@contextmanager
def _scratch(cache: Path | None) -> Iterator[tuple[Path, Path]]:
    """A directory for an environment, and uv's cache on the same file system."""
    with tempfile.TemporaryDirectory(prefix="kimi-rig-release-", dir=cache.parent if cache else None) as path:
        yield Path(path), cache or Path(path) / "cache"


def _recipe_of_this_machine(recipes: Sequence[Recipe]) -> Recipe:
    there = [recipe for recipe in recipes if Path(f"/usr/bin/python{recipe.python}").exists()]
    if not there:
        pythons = ", ".join(recipe.python for recipe in recipes)
        raise ReleaseError(f"this machine has none of the release's Pythons in /usr/bin ({pythons}): install one")
    return there[0]


@verb("release-add", "nothing was written")
@click.argument("engine", required=False)
@click.argument("version", required=False)
@click.option("--record", "releases", multiple=True, metavar="RELEASE", help="Ask a release that is there already.")
@click.option("--cache", type=Path, help="uv's cache, to be used and kept; the scratch directory lies beside it.")
def release_add_command(engine: str | None, version: str | None, releases: Sequence[str], cache: Path | None) -> int:
    """Lock VERSION of ENGINE (vllm, sglang), ask it, compare it with the newest, write its entry.

    Exit codes: 0 written; 1 failed, or written and something that our configurations need is refused.
    """
    # What is installed and asked here is run as whoever asks: on a machine of their own, which is no host.
    builder.unconfined()
    if releases:
        return record(releases, cache)
    if not (engine and version):
        raise click.UsageError("name ENGINE and VERSION (make release-add ENGINE=vllm VERSION=0.34.0)")
    return add(engine, version, cache)
