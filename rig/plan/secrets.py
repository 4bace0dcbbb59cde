"""Secrets of the operator's: from a file of his or typed at a prompt, never from a command line or a variable.

Host data names the file, or says "prompt". A wrapper that starts pyinfra several times asks once and hands the secret
on in an anonymous file (memfd) that only its children can open.
"""

import getpass
import os
import sys
from functools import cache
from pathlib import Path

PROMPT = "prompt"


class SecretError(Exception):
    """A secret cannot be had. The message says which and what to do."""


def read_secret(source: str, what: str) -> bytes:
    """The secret `what` from a file, or from the operator when `source` is "prompt".

    Raises SecretError when it is absent, empty, of several lines, or in a file that others can read.
    """
    if source == PROMPT:
        return ask(what)
    path = Path(source).expanduser()
    try:
        content = path.read_bytes()
        mode = path.stat().st_mode & 0o077
    except OSError as error:
        raise SecretError(f"{what}: {path} cannot be read: {error.strerror}") from None
    if mode:
        raise SecretError(f"{what}: {path} is readable by others; run `chmod 600 {path}`")
    return _one_line(content, what, str(path))


@cache
def ask(what: str) -> bytes:
    """Ask the operator, once a process. Raises SecretError without a terminal."""
    if not sys.stdin.isatty():
        raise SecretError(f'{what}: the data says "prompt", but there is no terminal to ask on; name a file instead')
    return _one_line(getpass.getpass(f"{what}: ").encode(), what, "the prompt")


def hand_on(secret: bytes) -> str:
    """A path that children started with `pass_fds` of its descriptor can read the secret from."""
    descriptor = os.memfd_create("kimi-rig-secret", 0)  # without close-on-exec: children inherit it
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret)
    return f"/proc/self/fd/{descriptor}"


def _one_line(content: bytes, what: str, where: str) -> bytes:
    content = content.strip()
    if not content or b"\n" in content:
        raise SecretError(f"{what}: {where} must give one line, the secret")
    if any(not 0x20 < byte < 0x7F for byte in content):
        # It travels in an HTTP header.
        raise SecretError(f"{what}: {where} gives characters that no key or token has (blanks, control, not ASCII)")
    return content
