"""What all operations share: notes for the plan, refusals, secrets on standard input, the list of what we created."""

import base64
import getpass
import json
import os
import shlex
import socket
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pyinfra import host, logger
from pyinfra.api.command import StringCommand
from typing_extensions import override

from rig.operations import locks
from rigctl.contract import layout

Commands = Generator[StringCommand, None, None]

PLAN_LOG = "KIMI_RIG_PLAN_LOG"
"""Environment variable: file to which a dry run appends one JSON object a detail (rig/cli/converge.py reads it)."""


REFUSED = "refused: "

LOCK_SECONDS = 60
"""Others hold the lock of `script` alone for a moment: a deploy that looks whether one before it still works."""


def note(detail: str) -> None:
    """Say in the plan what an operation would do. Call before the first yield: a dry run goes no further."""
    _log(operation=operation_name(), detail=detail)


def changes(details: Iterable[str], unchanged: str) -> bool:
    """Say in the plan what an operation would do; where that is nothing, why. Whether there is something to do."""
    found = list(details)
    for detail in found:
        note(detail)
    if not found:
        host.noop(unchanged)
    return bool(found)


def operator() -> str:
    """Who deploys, from where: for locks and records on the host."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def now() -> str:
    """The time, for records on the host."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def reached() -> None:
    """Say in the plan that the last operation was looked at: the host did not drop out."""
    _log(reached=True)


def pending(why: str) -> None:
    """Say in the plan that the host waits for a reboot."""
    _log(pending=why)


def notice(text: str) -> None:
    """Tell the operator something in plan and deploy that changes nothing."""
    _log(notice=text)
    if host.state.is_executing:
        logger.warning(f"{host.print_prefix}{text}")


def found(finding: str) -> None:
    """Report a warning or a note of the preflight: once in the plan, once while a deploy runs."""
    _log(finding=finding)
    if host.state.is_executing:
        logger.warning(f"{host.print_prefix}{finding}")


def disks(account: Sequence[Mapping[str, Any]]) -> None:
    """Tell the plan what lies on the host's disks and what a deploy adds."""
    _log(disk=account)


def _log(**entry: Any) -> None:
    path = os.environ.get(PLAN_LOG)
    if path is None or host.state.is_executing:
        return
    with open(path, "a", encoding="utf-8") as log:  # noqa: PTH123  # one short line a write, so appends do not mix
        log.write(json.dumps({"host": host.name, **entry}) + "\n")


def operation_name() -> str:
    """The name of the operation being evaluated."""
    if host.current_op_hash is None:
        return ""
    return ", ".join(sorted(host.state.get_op_meta(host.current_op_hash).names))


def refuse(message: str) -> Commands:
    """End this host's deploy with a message. A dry run goes on and lists it, so that all are seen at once."""
    note(f"{REFUSED}{message}")
    if not host.state.is_executing:
        logger.warning(f"{host.print_prefix}would be refused: {message}")
    yield StringCommand(f"printf '%s\\n' {shlex.quote(message)} >&2; exit 1")


class Input:
    """Bytes for a remote command's standard input, in base64 lines. Never shows its content."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def readlines(self) -> list[str]:
        return base64.encodebytes(self._content).decode("ascii").splitlines() or [""]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readlines())

    @override
    def __repr__(self) -> str:
        return f"<{len(self._content)} bytes>"


def script(*lines: str, content: bytes | None = None) -> StringCommand:
    """A remote sh script that stops at its first failing line; `content` arrives on its standard input in base64.

    It outlives a killed deploy, so it holds a shared lock for which the next deploy waits (deploy_lock.py).
    A line that may start a daemon closes descriptor 8, or the daemon would hold the lock.
    """
    # sudo keeps the umask of the login (sudoers(5), umask), which is 077 on many a rented host.
    held = f"{layout.AT_WORK} is locked by $({locks.held_by(layout.AT_WORK)})end it, and deploy again"
    alone = [locks.place_made(), locks.opened(8, layout.AT_WORK)]
    alone += [f'flock -s -w {LOCK_SECONDS} 8 || {{ echo "{held}" >&2; false; }}']
    text = "; ".join(["set -eu", "umask 022", *alone, *lines])
    if content is None:
        return StringCommand(text)
    return StringCommand(text, _stdin=Input(content))


def remember(kind: str, name: str) -> str:
    """A script line that puts `kind name` on the host's list of what we created, once. Comes before the making.

    kind: "file", "link", "directory" (removed when nothing foreign is in it), "tree" (a directory that is ours with all
    in it), "work" (such a directory that is there only while a step is at work), "package", "package-keep-config",
    "user", "group".
    """
    return f"mkdir -p {layout.STATE}; {_append(shlex.quote(f'{kind} {name}'))}"


def made(path: str) -> str:
    """A script line that makes a directory and the parents it lacks, and puts each of them on the list."""
    quoted, record = shlex.quote(path), _append('"directory $p"')
    return (
        f"mkdir -p {layout.STATE}; p={quoted}; "
        f'until [ -e "$p" ]; do {record}; p=$(dirname "$p"); done; mkdir -p {quoted}'
    )


def _append(entry: str) -> str:
    return f"grep -qxF {entry} {layout.CREATED} 2>/dev/null || echo {entry} >> {layout.CREATED}"


def remember_packages(names: Sequence[str], more: str = "") -> str:
    """A script line that lists what `apt-get install` of these brings anew: dependencies too, upgrades not.

    A removed package whose configuration was still there is listed as package-keep-config. more: shell words of
    further packages.
    """
    record = _append('"$k $n"')
    simulate = f"apt-get -s install --no-install-recommends {' '.join(map(shlex.quote, names))} {more}"
    return (
        f"mkdir -p {layout.STATE}; "
        f"for n in $({simulate} | sed -n '/^Inst [^ ]* \\[/d; s/^Inst \\([^ ]*\\).*/\\1/p'); do "
        "k=package; case $(dpkg-query -W -f '${db:Status-Status}' $n 2>/dev/null || true) in "
        "config-files) k=package-keep-config;; esac; "
        f"{record}; done"
    )
