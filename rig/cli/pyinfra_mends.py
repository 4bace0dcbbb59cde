"""What pyinfra 3.10 does wrong on the way to a host, put right for every way to start it (config.py calls `mend`).

A proxy: where pyinfra is started as a module, paramiko waits for its output for ever, with the select of an unpatched
stdlib, and turns in circles once the proxy has ended. Output: one byte that is no UTF-8 ends its reader, and the
command is waited for in vain.
"""

import shlex
import socket
import subprocess
from collections.abc import Iterable
from typing import Any

import paramiko.file
from pyinfra.connectors import util
from pyinfra.connectors.sshuserclient import client

from rig.cli.arguments import end_with_parent


def proxy(command: str) -> socket.socket:
    """The connection through a proxy command, as a socket: it has time limits, and an end when the proxy ends.

    What the proxy says on standard error is the operator's to read.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        subprocess.Popen(shlex.split(command), stdin=end, stdout=end, preexec_fn=end_with_parent)  # noqa: PLW1509  # prctl alone
    return ours


def text(line: str | bytes, _encoding: str = "utf8") -> str:
    """A line of a command's output; what is no UTF-8 becomes U+FFFD."""
    return line if isinstance(line, str) else line.decode("utf-8", "replace")


def mend() -> None:
    """Put all of it right in this process."""
    original = util.read_buffer

    def read_buffer(name: str, io: Iterable[str | bytes], *rest: Any, **more: Any) -> None:
        original(name, map(text, io), *rest, **more)

    vars(util)["read_buffer"] = read_buffer
    vars(paramiko.file)["u"] = text
    vars(client)["ProxyCommand"] = proxy
