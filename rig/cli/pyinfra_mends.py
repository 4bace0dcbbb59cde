"""What pyinfra 3.10 does wrong on the way to a host, put right for every way to start it (config.py calls `mend`).

A proxy: where pyinfra is started as a module, paramiko waits for its output for ever, with the select of an unpatched
stdlib, and turns in circles once the proxy has ended. Output: one byte that is no UTF-8 ends its reader, and the
command is waited for in vain; one without end is read for ever. Host keys: it takes any that it does not know yet.
Words of a host: it shows them as they come, whatever a terminal makes of them.
"""

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import paramiko
import paramiko.channel
import paramiko.file
from pyinfra.connectors import util
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.sshuserclient import client

from rig.cli.arguments import end_with_parent
from rig.cli.ssh import unknown_key
from rigctl.contract.foreign import gated, printable

MOST_OUTPUT = 64 << 20
"""Bytes of a command's output: more than any fact of a host."""


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


class Ending:
    """A stream of a command on a host, one of paramiko's; a host may write without end: then the command fails."""

    channel: paramiko.Channel
    left = MOST_OUTPUT

    def _read(self, size: int) -> bytes:
        block: bytes = super()._read(size)  # type: ignore[misc]  # of the class beside this one
        self.left -= len(block)
        if self.left >= 0:
            return block
        self.channel.close()
        print(f"a command's output has no end: nothing is read beyond {MOST_OUTPUT >> 20} MiB", file=sys.stderr)
        return b""


class Unknown(paramiko.MissingHostKeyPolicy):
    """A host whose key is not known gets nothing. Nobody is asked: the operator compares, and adds it himself."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises SSHException with the fingerprint and what to do."""
        kind = key.get_name().removeprefix("ssh-").partition("-sha2")[0].upper()
        line, file = f"{hostname} {key.get_name()} {key.get_base64()}", getattr(client, "_host_keys_filename", None)
        accept = f"echo {shlex.quote(line)} >> {shlex.quote(file or str(Path.home() / '.ssh/known_hosts'))}"
        raise paramiko.SSHException(f"{hostname}: {unknown_key(kind, key.fingerprint, accept)}")


def mend() -> None:
    """Put all of it right in this process."""
    original = util.read_buffer

    def read_buffer(
        name: str, io: Iterable[str | bytes], queue: Any, print_output: bool = False, print_func: Any = str
    ) -> None:
        original(name, map(text, io), queue, print_output, lambda line: (print_func or str)(printable(line, keep="\t")))

    sys.stdout, sys.stderr = gated(sys.stdout, colours=True), gated(sys.stderr, colours=True)

    original_config: Any = client.SSHClient.parse_config

    def parse_config(
        self: Any,
        hostname: str,
        initial_cfg: Any = None,
        ssh_config_file: Any = None,
        strict_host_key_checking: str | None = None,
    ) -> Any:
        found = original_config(self, hostname, initial_cfg, ssh_config_file, strict_host_key_checking)
        # Only the inventory may say otherwise (ssh_strict_host_key_checking: accept-new).
        policy = found[3] if strict_host_key_checking == "accept-new" else Unknown()
        return (*found[:3], policy, *found[4:])

    SSHConnector.data_meta["ssh_strict_host_key_checking"].default = "yes"
    client.SSHClient.parse_config = parse_config  # type: ignore[method-assign]  # that is what a mend is
    vars(util)["read_buffer"] = read_buffer
    vars(paramiko.file)["u"] = text
    for kind in (paramiko.channel.ChannelFile, paramiko.channel.ChannelStderrFile):
        vars(paramiko.channel)[kind.__name__] = type(kind.__name__, (Ending, kind), {})
    vars(client)["ProxyCommand"] = proxy
