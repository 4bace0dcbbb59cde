"""`kimi-rig diff`: what an edit of inventory/ changes, before any host is asked: entries, flags, units and findings."""

import difflib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from rig.artifacts.checkpoint_orders import unpinned
from rig.artifacts.host_checks import findings
from rig.artifacts.units import unit_files
from rig.catalog.entries import SECTIONS, catalogues_of, check_all, inventory_directory, load_catalog, overlays
from rig.catalog.yaml_source import CatalogError
from rig.cli.arguments import CONVERGED, FAILED, verb
from rig.cli.converge import RunFailed, inventory_hosts
from rig.cli.tour import recorded_plan
from rig.plan.host_plan import HostPlan

ENTRIES = "entries"
Lines = dict[str, list[str]]
"""Name of an entry, unit or order -> what it says, line by line. Findings have no name."""


@dataclass
class Side:
    """An inventory, planned. parts: title -> lines; wrong: title -> why it is not there."""

    parts: dict[str, Lines] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def planned(directory: Path, hosts: str) -> Side:
    """The catalogues in `directory` under every overlay, and the plan of each host of its file `hosts`.

    Raises RunFailed when that file cannot be read.
    """
    side = Side()
    for overlay in overlays(directory):
        title = f"entries under {overlay}" if overlay else ENTRIES
        try:
            catalog = load_catalog(overlay, directory)
        except CatalogError as error:
            side.wrong[title] = str(error)
            continue
        side.parts[title] = {
            f"{section}.{name}": list(_flat(entry.model_dump()))
            for section in SECTIONS
            for name, entry in getattr(catalog, section).items()
        }
    file = directory / hosts
    # A file that the edit adds was not in the commit.
    for host in inventory_hosts(str(file)) if file.is_file() else ():
        title = f"host {host['name']}"
        try:
            with catalogues_of(directory):
                plan = recorded_plan(host["data"])
                side.parts[title] = {Path(path).name: _lines(text) for path, text in unit_files(plan).items()}
                side.parts[f"{title}, findings"] = {"": [*map(str, findings(plan)), *_unpinned(plan)]}
        except CatalogError as error:
            side.wrong[title] = f"it cannot be planned with the recorded facts: {error}"
    return side


def _unpinned(plan: HostPlan) -> Iterator[str]:
    """What only a host shows: whether the files lie there already."""
    for name, entry in plan.checkpoints.items():
        if unpinned(entry):
            yield (
                f"warning: checkpoint {name} has no pinned revision: a host without its files refuses a deploy; "
                f"`make pin CHECKPOINT={name}` pins one"
            )


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{above}{key}.")
        else:
            yield f"{above}{key}: {inner}"


def _lines(text: str) -> list[str]:
    """One flag and one unit name a line, without digests: they differ whenever anything does."""
    text = re.sub(r"(?m)^(After|Conflicts)=(.*)$", lambda m: "\n".join(f"{m[1]}={unit}" for unit in m[2].split()), text)
    lines = (line.strip() for line in text.replace(" --", "\n--").splitlines())
    return [line for line in lines if not re.search(r'"[0-9a-f]{64}"', line)]


def differences(before: Side, after: Side) -> Iterator[str]:
    """What differs, for people: equal changes of several names are one paragraph."""
    said: set[tuple[str, tuple[str, ...]]] = set()
    for title in dict.fromkeys([*before.parts, *after.parts]):
        if title.removesuffix(", findings") in before.wrong.keys() | after.wrong.keys():
            continue
        old, new = before.parts.get(title), after.parts.get(title)
        if old is None and title.startswith(ENTRIES):  # a new overlay changes the entries as they are without it
            old = before.parts.get(ENTRIES)
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in dict.fromkeys([*(old or {}), *(new or {})]):
            change = _change((old or {}).get(name), (new or {}).get(name), named=bool(name))
            # Of a new host the names are enough; what an overlay leaves as it is was said of the entry itself.
            change = change if old is not None or not name else change[:1]
            if change and (name, change) not in said:
                groups.setdefault(change, []).append(name)
                said |= {(name, change)} if title == ENTRIES else set()
        if groups:
            yield f"{title}:"
        for change, names in groups.items():
            yield from [f"  {', '.join(names)}"] if any(names) else []
            yield from (f"    {line}" for line in change)


def _change(old: list[str] | None, new: list[str] | None, *, named: bool) -> tuple[str, ...]:
    if named and old is None:
        return ("new", *(line for line in new or () if line.startswith("--")))
    if named and new is None:
        return ("gone",)
    lines = difflib.unified_diff(old or [], new or [], n=0, lineterm="")
    # The first two are file names.
    return tuple(f"{line[0]} {line[1:]}" for line in itertools.islice(lines, 2, None) if not line.startswith("@@"))


def at_commit(directory: Path, reference: str, scratch: str) -> Path:
    """The directory as it was in a commit, unpacked into `scratch`. Raises RunFailed."""
    target = Path(scratch, directory.name)
    target.mkdir()
    try:
        # Of a directory inside a repository, its own content alone.
        archive = subprocess.run(["git", "-C", directory, "archive", reference], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", target], input=archive, capture_output=True, check=True)
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        raise RunFailed(f"{directory} as of {reference} could not be read: {why}") from None
    return target


@verb("diff")
@click.option("--ref", default="HEAD", show_default=True, help="Commit, branch or tag to compare with.")
@click.option("--hosts", default="gpu.py", show_default=True, help="File of the inventory with the hosts.")
def diff_command(ref: str, hosts: str) -> int:
    """Print what an edit of inventory/ changes: entries, flags, units and findings. No host is asked.

    The inventory of a commit and the one of the working tree are planned by the same code for the recorded host with
    eight cards (rig/facts/turin-direct.json).

    Exit codes: 0 compared; 1 the edited inventory is wrong or cannot be compared.
    """
    directory = inventory_directory()
    check_all(directory)
    inventory_hosts(str(directory / hosts))  # a mistyped name is refused
    after = planned(directory, hosts)
    with tempfile.TemporaryDirectory(prefix="kimi-rig-diff-") as scratch:
        before = planned(at_commit(directory, ref, scratch), hosts)
    for inventory, side in ((ref, before), ("the edited inventory", after)):
        for title, why in side.wrong.items():
            print(f"{inventory}: {title}: not compared: {why}")
    said = list(differences(before, after))
    print("\n".join(said) or f"nothing differs from {ref}")
    if any(line.startswith("host ") for line in said):
        print("a unit becomes stale by its [Service] lines: `After`, `Conflicts` and descriptions restart nothing")
    return FAILED if after.wrong else CONVERGED
