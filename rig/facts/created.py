"""What we brought to a host (/var/lib/kimi-rig/created), and what is there of it."""

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
    unreadable: records of checkpoints that do not say where theirs lies and whose it is.
    """

    recorded: bool = False
    there: tuple[tuple[str, str], ...] = ()
    inside: dict[str, list[str]] = field(default_factory=dict)
    adopted: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

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
        # Not asked of rigctl: it may be broken, or gone by an uninstall that was interrupted. JSON has no line break
        # but between its parts.
        records = (
            f"for r in {layout.STATE}/checkpoints/*.json; do "
            '[ ! -e "$r" ] || { printf "record|%s|" "$r"; tr "\\n" " " < "$r"; echo; }; done'
        )
        return (
            f"[ ! -e {layout.CREATED} ] || {{ echo recorded; "
            'while read -r kind name || [ -n "$kind" ]; do '
            f'if {present}; then echo "there|$kind|$name"; {inside}; {real}; fi; done < {layout.CREATED}; '
            f"{records}; }}; true"
        )

    default = Created

    def process(self, output: Iterable[str]) -> Created:
        there: list[tuple[str, str]] = []
        inside: dict[str, list[str]] = {}
        real: dict[str, PurePosixPath] = {}
        adopted: list[PurePosixPath] = []
        unreadable: list[str] = []
        recorded = False
        for line in output:
            match line.split("|", 2):
                case ["recorded"]:
                    recorded = True
                case ["there", kind, name]:
                    there.append((kind, name))
                case ["inside", directory, path]:
                    inside.setdefault(directory, []).append(path)
                case ["real", tree, path]:
                    real[tree] = PurePosixPath(path)
                case ["record", path, text]:
                    try:
                        record = json.loads(text)
                        if record["origin"] == "adopted":
                            adopted.append(PurePosixPath(record["path"]))
                    except (ValueError, KeyError, TypeError):
                        unreadable.append(path)
        theirs = [tree for tree, place in real.items() if any(path.is_relative_to(place) for path in adopted)]
        return Created(recorded, tuple(there), inside, tuple(theirs), tuple(unreadable))


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
