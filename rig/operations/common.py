"""What all operations share: notes for the plan, refusals, secrets on standard input, the list of what we created."""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Generator, Iterator
from typing import Any

from pyinfra import host, logger
from pyinfra.api.command import StringCommand
from typing_extensions import override

from rig import layout

Commands = Generator[StringCommand, None, None]

PLAN_LOG = "KIMI_RIG_PLAN_LOG"
"""Environment variable: file to which a dry run appends one JSON object a detail (rig/converge.py reads it)."""


REFUSED = "refused: "


def note(detail: str) -> None:
    """Say in the plan what an operation would do. Call before the first yield: a dry run goes no further."""
    _log(operation=operation_name(), detail=detail)


def reached() -> None:
    """Say in the plan that the last operation was looked at: the host did not drop out."""
    _log(reached=True)


def pending(why: str) -> None:
    """Say in the plan that the host waits for a reboot."""
    _log(pending=why)


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
    """A remote sh script that stops at its first failing line; `content` arrives on its standard input in base64."""
    text = "; ".join(["set -eu", *lines])
    if content is None:
        return StringCommand(text)
    return StringCommand(text, _stdin=Input(content))


def remember(kind: str, name: str) -> str:
    """A script line that puts `kind name` on the host's list of what we created, once."""
    entry = shlex.quote(f"{kind} {name}")
    created = layout.CREATED
    return f"mkdir -p {layout.STATE}; grep -qxF {entry} {created} 2>/dev/null || echo {entry} >> {created}"
