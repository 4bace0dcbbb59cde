"""Facts that operations compare with: each is one remote command in POSIX sh, and works on a bare host."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyinfra.api.facts import FactBase

from rig.facts.host import unit_properties
from rigctl.contract import layout


@dataclass(frozen=True)
class Basics:
    """What is known before anything is installed. gpus: PCI device ids (hexadecimal) of NVIDIA display controllers."""

    distribution: str = ""
    machine: str = ""
    gpus: tuple[str, ...] = ()


class HostBasics(FactBase[Basics]):
    """Distribution, architecture and the GPUs the PCI bus shows (no driver needed: sysfs)."""

    def command(self) -> str:
        return (
            '. /etc/os-release; echo "os $ID-$VERSION_ID"; echo "machine $(uname -m)"; '
            "for d in /sys/bus/pci/devices/*; do [ -e $d/physfn ] && continue; "
            'case "$(cat $d/vendor 2>/dev/null) $(cat $d/class 2>/dev/null)" in '
            '"0x10de 0x03"*) echo "gpu $(cat $d/device)";; esac; done'
        )

    default = Basics

    def process(self, output: Iterable[str]) -> Basics:
        found: dict[str, list[str]] = {"os": [], "machine": [], "gpu": []}
        for line in output:
            key, _, value = line.partition(" ")
            found.setdefault(key, []).append(value)
        return Basics("".join(found["os"]), "".join(found["machine"]), tuple(found["gpu"]))


@dataclass(frozen=True)
class PathState:
    """One path on the host. kind: "file", "directory", "link" or stat's own word. content: sha256 or link target."""

    kind: str
    mode: str
    owner: str
    group: str
    content: str = ""


_KINDS = {"regular file": "file", "regular empty file": "file", "symbolic link": "link"}


class PathStates(FactBase[dict[str, PathState]]):
    """Kind, mode, owner, group and content digest of many paths; absent ones are left out."""

    def command(self, paths: list[str]) -> str:
        names = " ".join(shlex.quote(path) for path in paths)
        links = f'for p in {names}; do [ -L "$p" ] && echo "link|$p|$(readlink "$p")"; done'
        return f"stat -c 'stat|%n|%F|%a|%U|%G' -- {names} 2>/dev/null; sha256sum -- {names} 2>/dev/null; {links}; true"

    default = dict

    def process(self, output: Iterable[str]) -> dict[str, PathState]:
        states: dict[str, PathState] = {}
        content: dict[str, str] = {}
        for line in output:
            match line.split("|"):
                case ["stat", path, kind, mode, owner, group]:
                    states[path] = PathState(_KINDS.get(kind, kind), mode.zfill(4), owner, group)
                case ["link", path, target]:
                    content[path] = target
                case [other]:
                    digest, _, path = other.partition("  ")
                    content.setdefault(path, digest)
        return {
            path: PathState(s.kind, s.mode, s.owner, s.group, "" if s.kind == "directory" else content.get(path, ""))
            for path, s in states.items()
        }


class InstalledPackages(FactBase[list[str]]):
    """Those of the named Debian packages that are installed."""

    def command(self, packages: list[str]) -> str:
        names = " ".join(shlex.quote(name) for name in packages)
        return f"dpkg-query -W -f '${{db:Status-Status}} ${{Package}}\\n' {names} 2>/dev/null; true"

    default = list

    def process(self, output: Iterable[str]) -> list[str]:
        return [name for status, _, name in (line.partition(" ") for line in output) if status == "installed"]


class Lines(FactBase[list[str]]):
    """The output of one short read-only command, as lines; a missing program is no output."""

    def command(self, script: str) -> str:
        return f"( {script} ) 2>/dev/null; true"

    default = list

    def process(self, output: Iterable[str]) -> list[str]:
        return [line for line in output if line]


class MatchesInput(FactBase[str]):
    """Mode, owner and group of `path` when its content is what stands (in base64) on standard input, else ""."""

    def command(self, path: str) -> str:
        quoted = shlex.quote(path)
        return f"base64 -d | cmp -s - {quoted} && stat -c '%a %U %G' {quoted}; true"

    default = str

    def process(self, output: Iterable[str]) -> str:
        return "".join(output)


class UnitProperties(FactBase[dict[str, dict[str, str]]]):
    """`systemctl show` of several units: name -> property -> value; one that does not exist says so in LoadState."""

    PROPERTIES = (
        "Id",
        "LoadState",
        "ActiveState",
        "SubState",
        "Result",
        "UnitFileState",
        "NeedDaemonReload",
        "StatusText",
    )

    def command(self, units: list[str]) -> str:
        names = " ".join(shlex.quote(unit) for unit in units)
        return f"systemctl show --property={','.join(self.PROPERTIES)} -- {names} 2>/dev/null; true"

    default = dict

    def process(self, output: Iterable[str]) -> dict[str, dict[str, str]]:
        return unit_properties("\n".join(output))


@dataclass(frozen=True)
class Job:
    """A transient unit. active: still at work. last: its last line in the journal."""

    active: bool = False
    result: str = ""
    last: str = ""


class JobState(FactBase[Job]):
    """Whether a transient unit runs, how it ended, and its last line."""

    def command(self, unit: str) -> str:
        name = shlex.quote(unit)
        last = f"journalctl -q -n 1 -o cat _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {name}) | tail -n 1"
        # One byte that is no UTF-8 would hang pyinfra's reader for ever.
        printable = "tr -cd '[:print:]\\n' | cut -c1-200"
        return f"systemctl show -P ActiveState {name}; systemctl show -P Result {name}; {last} | {printable}"

    default = Job

    def process(self, output: Iterable[str]) -> Job:
        active, result, last = [*output, "", "", ""][:3]
        return Job(active in ("active", "activating", "deactivating", "reloading"), result, last)


@dataclass(frozen=True)
class Service:
    """A configuration on a host by its own `rigctl status`. started_as: digests of what it runs as, where it runs."""

    name: str
    stale: bool = False
    started_as: frozenset[str] = frozenset()


class Services(FactBase[list[Service] | None]):
    """Every configuration of a host; none where there is no rigctl yet, None where it does not answer."""

    SECONDS = 60

    def command(self) -> str:
        status = f"timeout {self.SECONDS} {layout.RIGCTL} status --json 2>/dev/null || echo '[{layout.RIGCTL} failed'"
        return f"if [ -e {layout.RIGCTL} ]; then {status}; else echo '[]'; fi"

    @staticmethod
    def default() -> list[Service] | None:
        return None

    def process(self, output: Iterable[str]) -> list[Service] | None:
        found: list[Service] = []
        try:
            for row in json.loads("\n".join(output)):
                started = row["started"]
                digests = frozenset([started["digest"], *started["same_as"]] if started else [])
                found.append(Service(str(row["name"]), bool(row["stale"]), digests))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return found


class JsonFile(FactBase[Any]):
    """A JSON file on the host; None when it is absent or broken (then it is written anew)."""

    def command(self, path: str) -> str:
        return f"cat {shlex.quote(path)} 2>/dev/null; true"

    def process(self, output: Iterable[str]) -> Any:
        try:
            return json.loads("\n".join(output))
        except ValueError:
            return None


@dataclass(frozen=True)
class Rights:
    """user: the login. root: whether commands run as root. trouble: sudo's own words when they do not."""

    user: str = ""
    root: bool = True
    trouble: str = ""


class Privilege(FactBase[Rights]):
    """The login, and with `sudo` whether sudo works without asking anything. Never waits for a password."""

    def command(self, sudo: bool) -> str:
        root = "sudo -n id -u 2>&1" if sudo else "id -u"
        return f'echo "user $(id -un)"; ( {root} ) </dev/null | tail -n 1 | sed "s/^/root /"'

    default = Rights

    def process(self, output: Iterable[str]) -> Rights:
        found = dict(line.split(" ", 1) for line in output if " " in line)
        answer = found.get("root", "")
        return Rights(found.get("user", ""), answer == "0", "" if answer.isdigit() else answer.removeprefix("sudo: "))
