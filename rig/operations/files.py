"""Files, directories and links: all of a stage in one fact and one operation, each write atomic."""

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pyinfra import host
from pyinfra.api import operation
from pyinfra.api.command import StringCommand

from rig.facts.state import MatchesInput, PathState, PathStates
from rig.operations.common import Commands, Input, changes, made, refuse, remember, script


@dataclass(frozen=True)
class Directory:
    """A directory. Without owner and mode one that exists is left as it is: it may be the operator's."""

    path: str
    mode: str | None = None
    owner: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class File:
    """A file with exactly this content."""

    path: str
    content: bytes
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    path: str
    target: str


Entry = Directory | File | Link


def difference(entry: Entry, state: PathState | None) -> str | None:
    """In words how the host differs from `entry`; None when it does not. Pure."""
    if state is None:
        return f"{entry.path} is missing"
    kind = type(entry).__name__.lower()
    if state.kind != kind:
        return f"{entry.path} is a {state.kind}, not a {kind}"
    if isinstance(entry, Link):
        return None if state.content == entry.target else f"{entry.path} points to {state.content}"
    wanted = {"mode": entry.mode, "owner": entry.owner, "group": entry.group}
    wrong = [
        f"{key} {getattr(state, key)} (not {want})"
        for key, want in wanted.items()
        if want not in (None, getattr(state, key))
    ]
    if isinstance(entry, File) and state.content != entry.digest:
        wrong.insert(0, "content differs")
    return f"{entry.path}: {', '.join(wrong)}" if wrong else None


@operation()
def present(entries: Sequence[Entry]) -> Commands:
    """Bring files, directories and links to the given state; parents first, in the order given.

    A path that is another kind of thing is never replaced: the operation refuses and names it.
    """
    states = host.get_fact(PathStates, paths=[entry.path for entry in entries])
    found = {entry: text for entry in entries if (text := difference(entry, states.get(entry.path)))}
    if not changes(found.values(), f"{len(entries)} paths are as they should be"):
        return
    for entry, text in found.items():
        state = states.get(entry.path)
        if state is not None and state.kind != type(entry).__name__.lower():
            yield from refuse(f"{text}; move it away and deploy again")
            return
    for entry in found:
        yield write(entry, existed=entry.path in states)


@operation()
def secret(path: str, content: bytes, group: str | None = None) -> Commands:
    """A secret as a file of root's, mode 0600; 0640 for a group that may read it.

    It travels on standard input and shows up nowhere else.
    """
    mode, of = ("0600", "root") if group is None else ("0640", group)
    wanted = f"{mode.lstrip('0')} root {of}"
    # pyinfra types _stdin as str or list; any object with readlines() is taken and, unlike a str, never printed.
    found = host.get_fact(MatchesInput, path=path, _stdin=Input(content))
    wrong = f"{path}: is {found}, not {wanted}" if found else f"{path}: secret differs"
    if not changes([wrong] if found != wanted else [], f"{path} is as it should be"):
        return
    yield write(File(path, content, mode=mode, group=of), existed=bool(found))


def write(entry: Entry, *, existed: bool) -> StringCommand:
    """One atomic write. existed: whether the path was there before (else it is remembered as ours)."""
    path = shlex.quote(entry.path)
    kind = type(entry).__name__.lower()
    lines = [] if existed else [f"[ -e {path} ] || {{ {remember(kind, entry.path)}; }}"]
    parent = str(PurePosixPath(entry.path).parent)
    match entry:
        case Directory():
            return script(made(entry.path), *_ownership(entry, path))
        case Link():
            temporary = shlex.quote(f"{entry.path}.kimi-rig")
            return script(
                *lines, made(parent), f"ln -sfn {shlex.quote(entry.target)} {temporary}", f"mv -fT {temporary} {path}"
            )
        case File():
            name, make_parent = PurePosixPath(entry.path).name, made(parent)
            parent = shlex.quote(parent)
            return script(
                *lines,
                make_parent,
                # A killed deploy may have left its temporary file.
                f"rm -f {parent}/.{shlex.quote(name)}.kimi-rig.*",
                f"t=$(mktemp {parent}/.{shlex.quote(name)}.kimi-rig.XXXXXX)",
                'base64 -d > "$t"',
                *_ownership(entry, '"$t"'),
                'sync "$t"',
                f'mv -fT "$t" {path}',
                content=entry.content,
            )


def _ownership(entry: Directory | File, path: str) -> list[str]:
    lines = []
    if entry.owner is not None or entry.group is not None:
        owner = f"{entry.owner or ''}:{entry.group or ''}"
        lines.append(f"chown {shlex.quote(owner)} {path}")
    if entry.mode is not None:
        lines.append(f"chmod {entry.mode} {path}")
    return lines
