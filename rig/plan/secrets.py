"""Secrets of the operator's: from a file of his or typed at a prompt, never from a command line or a variable.

Host data names the file, or says "prompt". A wrapper that starts pyinfra several times asks once and hands the secret
on in an anonymous file (memfd) that only its children can open.
"""

import getpass
import hashlib
import os
import ssl
import sys
from functools import cache
from pathlib import Path

from rigctl.errors import RigctlError

PROMPT = "prompt"


class SecretError(RigctlError):
    """A secret cannot be read. The message says which and what to do."""


def read_secret(source: str, what: str) -> bytes:
    """The secret `what` from a file, or from the operator when `source` is "prompt".

    Raises SecretError when it is absent, empty, of several lines, or in a file that others can read.
    """
    if source == PROMPT:
        return ask(what)
    return _one_line(_private(source, what), what, source)


def key_digest(source: str, what: str) -> str:
    """sha256 of an API key, in hex digits: of the key in a file, or as the data says it ("sha256:...").

    Raises SecretError.
    """
    given = source.removeprefix("sha256:")
    return given if given != source else hashlib.sha256(read_secret(source, what)).hexdigest()


def read_certificate(certificate: str, key: str) -> bytes:
    """A certificate with its chain and its key, in one PEM text. Raises SecretError."""
    chain, private = read_certificates(certificate), _private(key, "key of the certificate")
    if b"PRIVATE KEY-----" not in private or b"ENCRYPTED" in private:
        raise SecretError(f"key of the certificate: {key} holds no private key in PEM without a password")
    return chain + private.strip() + b"\n"


def read_certificates(path: str) -> bytes:
    """Certificates in PEM. Raises SecretError."""
    end = "-----END CERTIFICATE-----"
    try:
        found = Path(path).expanduser().read_bytes().strip()
        ssl.PEM_cert_to_DER_cert(found.decode("ascii").partition(end)[0] + end)
    except OSError as error:
        raise SecretError(f"certificate: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SecretError(f"certificate: {path} does not begin with a certificate in PEM") from None
    return found + b"\n"


def _private(source: str, what: str) -> bytes:
    path = Path(source).expanduser()
    try:
        content = path.read_bytes()
        mode = path.stat().st_mode & 0o077
    except OSError as error:
        raise SecretError(f"{what}: {path} cannot be read: {error.strerror}") from None
    if mode:
        raise SecretError(f"{what}: {path} is readable by others; run `chmod 600 {path}`")
    return content


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
