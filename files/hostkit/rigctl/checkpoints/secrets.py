"""Secrets of a job: read from where its order says they lie, never logged."""

from __future__ import annotations

import os
from pathlib import Path

from rigctl.contract.checkpoint_job import Secret
from rigctl.errors import RigctlError


def text(secret: Secret | None) -> str | None:
    """The secret's text; None where none is ordered. Raises RigctlError when it cannot be read."""
    if secret is None:
        return None
    place = _place(secret)
    try:
        if secret.file is not None and place.stat().st_mode & 0o077:
            raise RigctlError(f"{place} can be read by others: chmod 600 it")
        found = place.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RigctlError(f"secret {place} cannot be read: {error.strerror}") from error
    if not found:
        raise RigctlError(f"secret {place} is empty")
    return found


def _place(secret: Secret) -> Path:
    if secret.file is not None:
        return Path(secret.file)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise RigctlError(
            f"credential {secret.credential!r} is wanted, but $CREDENTIALS_DIRECTORY is not set: "
            "start the job through its systemd unit (LoadCredential=)"
        )
    return Path(directory) / str(secret.credential)
