"""What we brought to a host (/var/lib/kimi-rig/created), and what is there of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pyinfra.api.facts import FactBase

from rigctl.contract import layout


@dataclass(frozen=True)
class Created:
    """The record. there: (kind, name) of entries that exist now. inside: recorded directory -> what lies in it.
    adopted: trees with a checkpoint that was found, not staged: it came to its path after a staging had failed there.
    """

    recorded: bool = False
    there: tuple[tuple[str, str], ...] = ()
    inside: dict[str, list[str]] = field(default_factory=dict)
    adopted: tuple[str, ...] = ()

    def names(self, *kinds: str) -> list[str]:
        """Names of what is there of these kinds, in the order of the record."""
        return [name for kind, name in self.there if kind in kinds]


class CreatedThings(FactBase[Created]):
    """The record of what we created, compared with the host in one command."""

    def command(self) -> str:
        present = (
            "case $kind in "
            "package*) dpkg-query -W -f '${db:Status-Status}' \"$name\" 2>/dev/null | "
            "grep -qvxe not-installed -e config-files;; "
            'user) getent passwd "$name" >/dev/null;; '
            'group) getent group "$name" >/dev/null;; '
            '*) [ -e "$name" ] || [ -L "$name" ];; esac'
        )
        inside = '[ "$kind" != directory ] || find "$name" -mindepth 1 -maxdepth 1 -printf "inside|$name|%p\\n"'
        real = '[ "$kind" != tree ] || echo "real|$name|$(readlink -f -- "$name")"'
        # One key a line, those of the record itself indented by one blank (rigctl/checkpoints/paths.py, write_json).
        adopted = (
            f"for r in {layout.STATE}/checkpoints/*.json; do "
            '! grep -qs \'^ "origin": "adopted"\' "$r" || sed -n \'s/^ "path": /adopted|/p\' "$r"; done'
        )
        return (
            f"[ ! -e {layout.CREATED} ] || {{ echo recorded; "
            'while read -r kind name || [ -n "$kind" ]; do '
            f'if {present}; then echo "there|$kind|$name"; {inside}; {real}; fi; done < {layout.CREATED}; '
            f"{adopted}; }}; true"
        )

    def default(self) -> Created:  # type: ignore[override]  # see rig/facts/state.py
        return Created()

    def process(self, output: Iterable[str]) -> Created:
        there: list[tuple[str, str]] = []
        inside: dict[str, list[str]] = {}
        real: dict[str, PurePosixPath] = {}
        adopted: list[str] = []
        recorded = False
        for line in output:
            match line.split("|"):
                case ["recorded"]:
                    recorded = True
                case ["there", kind, name]:
                    there.append((kind, name))
                case ["inside", directory, path]:
                    inside.setdefault(directory, []).append(path)
                case ["real", tree, path]:
                    real[tree] = PurePosixPath(path)
                case ["adopted", text]:
                    adopted.append(json.loads(text.rstrip(",")))
        theirs = [tree for tree, place in real.items() if any(PurePosixPath(p).is_relative_to(place) for p in adopted)]
        return Created(recorded, tuple(there), inside, tuple(theirs))


class PackagesRemovedWith(FactBase[dict[str, set[str]]]):
    """Package -> all installed packages that its removal would take along (itself too), by apt's own simulation."""

    def command(self, packages: Sequence[str]) -> str:
        names = " ".join(map(shlex.quote, packages))
        simulate = "apt-get -s -o APT::Get::AutomaticRemove=false remove --allow-change-held-packages"
        parse = 'sed -n "s/^Remv \\([^ ]*\\).*/$p|\\1/p"'
        every = f"{simulate} {names} 2>/dev/null | sed -n 's/^Remv \\([^ ]*\\).*/|\\1/p'"
        # One by one only when they are needed by others: a simulation takes a second.
        others = " ".join(f"-e {shlex.quote(f'|{name}')}" for name in packages)
        return (
            f'all=$({every}); echo "$all"; if echo "$all" | grep -qvxF {others}; then '
            f"for p in {names}; do {simulate} $p 2>/dev/null | {parse}; done; fi; true"
        )

    default = dict

    def process(self, output: Iterable[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for line in output:
            package, separator, removed = line.partition("|")
            if separator:
                found.setdefault(package, set()).add(removed)
        return found
