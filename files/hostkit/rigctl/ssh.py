"""The SSH client as the builder runs it: with root's keys for this one connection, and with nothing else of root's."""

from collections.abc import Sequence
from pathlib import Path

from rigctl import builder

ROOTS = Path("/root/.ssh")
IDENTITIES = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
"""What the client looks for where no key is named (ssh_config(5), IdentityFile)."""
TRANSIENT = (255, -1, -9)
"""Exit codes that a better line cures: the client's own, and those of one that was ended."""
REFUSALS = ("Permission denied", "Host key verification failed")


def client(
    unit: str, port: int = 22, identity: str | None = None, known_hosts: str | None = None
) -> tuple[list[str], Sequence[str]]:
    """(first words of the command, properties of its unit). It asks no questions; the host key must be known.

    unit: as for `builder.sandboxed`. identity, known_hosts: files that root can read; unset: root's own.
    """
    keys = [Path(identity)] if identity else [path for name in IDENTITIES if (path := ROOTS / name).exists()]
    words = ["ssh", "-p", str(port), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    words += ["-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20", "-o", "UpdateHostKeys=no"]
    words += ["-o", "IdentitiesOnly=yes"] if identity else []
    properties = []
    for number, path in enumerate([Path(known_hosts or ROOTS / "known_hosts"), *keys]):
        if path.exists():
            there, lent = builder.lent(unit, f"file-{number}", path)
            words += ["-o", f"UserKnownHostsFile={there}"] if number == 0 else ["-i", there]
            properties += lent
    return words, properties
