"""`make diff`: what an edit of inventory/ changes, before any host is asked: entries, flags, units and findings.

The inventory of a commit (REF, default HEAD) and the one of the working tree are planned by the same code for the
recorded host with eight cards (rig/facts/turin-direct.json). Exit codes: 0 compared, 1 the edited inventory is wrong or
cannot be compared, 64 wrong usage.
"""

from __future__ import annotations

import difflib
import io
import itertools
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig.artifacts.host_checks import findings
from rig.artifacts.units import unit_files
from rig.catalog.entries import SECTIONS, catalogues_of, inventory_directory, load_catalog, overlays
from rig.catalog.yaml_source import CatalogError
from rig.cli.arguments import Parser
from rig.cli.converge import FAILED, RunFailed, inventory_hosts
from rig.cli.tour import recorded_plan

Groups = dict[tuple[str, ...], list[str]]
"""What changed, line by line -> the names for which it did."""


@dataclass
class Side:
    """An inventory, planned. entries: (overlay, section, name) -> key -> value; files and findings: by host.

    wrong: overlay or host -> why it is not compared.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    entries: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    findings: dict[str, list[str]] = field(default_factory=dict)


def planned(directory: Path, hosts: str, *, must_be_right: bool) -> Side:
    """The catalogues in `directory` under every overlay, and the plan of each host of its file `hosts`.

    Raises CatalogError, RunFailed for one that must be right.
    """
    side = Side()
    there = must_be_right or (directory / hosts).is_file()
    found = inventory_hosts(str(directory / hosts)) if there else []
    for overlay in overlays(directory):
        try:
            catalog = load_catalog(overlay, directory)
        except CatalogError as error:
            if must_be_right:
                raise
            side.wrong[overlay or ""] = str(error)
            continue
        for section in SECTIONS:
            for name, entry in getattr(catalog, section).items():
                side.entries[overlay or "", section, name] = dict(_flat(entry.model_dump()))
    for host in found:
        try:
            with catalogues_of(directory):
                plan = recorded_plan(host["data"])
                side.findings[host["name"]] = [str(finding) for finding in findings(plan)]
                files = {Path(path).name: _lines(text) for path, text in unit_files(plan).items()}
        except CatalogError as error:
            side.wrong[host["name"]], files = f"cannot be planned for the recorded host: {error}", {}
        side.files[host["name"]] = files
    return side


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{above}{key}.")
        else:
            yield f"{above}{key}", inner


def _lines(text: str) -> list[str]:
    """One flag and one unit name a line, without digests: they differ whenever anything does."""
    text = re.sub(r"(?m)^(After|Conflicts)=(.*)$", lambda m: "\n".join(f"{m[1]}={unit}" for unit in m[2].split()), text)
    return [line.strip() for line in text.replace(" --", "\n--").splitlines() if 'digest": "' not in line]


def text(before: Side, after: Side) -> str:
    """The differences for people; empty when there are none."""
    blocks = [("entries", _entries(before, after))]
    for host in sorted(before.files.keys() | after.files.keys()):
        if host not in before.files or host not in after.files:
            here = after if host in after.files else before
            blocks.append((f"host {host}", {("new" if here is after else "gone",): sorted(here.files[host])}))
        else:
            blocks.append((f"host {host}, units and orders", _files(before.files[host], after.files[host])))
        said = _difference(before.findings.get(host, []), after.findings.get(host, []))
        blocks.append((f"host {host}, findings of the preflight", {said: []} if said else {}))
    return "\n".join(line for title, groups in blocks if groups for line in _block(title, groups))


def _block(title: str, groups: Groups) -> Iterator[str]:
    yield f"{title}:"
    for lines, names in groups.items():
        if names:
            yield f"  {', '.join(names)}"
        yield from (f"    {line}" for line in lines)


def _files(old: Mapping[str, list[str]], new: Mapping[str, list[str]]) -> Groups:
    groups: Groups = {}
    for name in sorted(old.keys() | new.keys()):
        if lines := _changed(old.get(name), new.get(name)):
            groups.setdefault(lines, []).append(name)
    return groups


def _entries(before: Side, after: Side) -> Groups:
    groups: Groups = {}
    for key in dict.fromkeys([*before.entries, *after.entries]):
        overlay, section, name = key
        change = _entry_change(before, after, key)
        # What an overlay leaves as it is was said of the entry itself.
        if (
            change
            and overlay not in before.wrong
            and (not overlay or change != _entry_change(before, after, ("", section, name)))
        ):
            under = f" under {overlay}" if overlay else ""
            groups.setdefault(change, []).append(f"{section}.{name}{under}")
    return groups


def _entry_change(before: Side, after: Side, key: tuple[str, str, str]) -> tuple[str, ...]:
    old, new = before.entries.get(key), after.entries.get(key)
    if old is None or new is None:
        return ("new",) if old is None and new is not None else ("gone",) if old is not None else ()
    keys = dict.fromkeys([*old, *new])
    return tuple(f"{one}: {old.get(one)!r} -> {new.get(one)!r}" for one in keys if old.get(one) != new.get(one))


def _changed(old: Sequence[str] | None, new: Sequence[str] | None) -> tuple[str, ...]:
    if old is None:
        return ("new", *(line for line in new or () if line.startswith("--")))
    return ("gone",) if new is None else _difference(old, new)


def _difference(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    lines = itertools.islice(difflib.unified_diff(old, new, n=0, lineterm=""), 2, None)  # without its two file names
    return tuple(f"{line[0]} {line[1:]}" for line in lines if not line.startswith("@@"))


def at_commit(directory: Path, reference: str, scratch: Path) -> Path:
    """The directory as it was in a commit, unpacked below `scratch`. Raises RunFailed."""
    command = ["git", "-C", str(directory), "archive", "--format=tar", reference]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise RunFailed(f"{directory} as of {reference} could not be read: {why}") from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(scratch / directory.name, filter="data")
    return scratch / directory.name


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the edit changes."""
    parser = Parser(prog="python -m rig.cli.diff", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ref", default="HEAD", help="commit, branch or tag to compare with; default HEAD")
    parser.add_argument("--hosts", default="gpu.py", help="file of the inventory with the hosts; default gpu.py")
    arguments = parser.parse_args(argv)
    directory = inventory_directory()
    try:
        with tempfile.TemporaryDirectory(prefix="kimi-rig-diff-") as scratch:
            old = at_commit(directory, arguments.ref, Path(scratch))
            after = planned(directory, arguments.hosts, must_be_right=True)
            before = planned(old, arguments.hosts, must_be_right=False)
        for inventory, side in ((arguments.ref, before), ("the edited inventory", after)):
            for name, why in side.wrong.items():
                print(f"{inventory}: {f'{name} is' if name else 'its catalogues are'} not compared: {why}")
        print(text(before, after) or f"nothing differs from {arguments.ref}")
    except (CatalogError, RunFailed) as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
