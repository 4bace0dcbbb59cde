"""The plan of the host that pyinfra is working on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyinfra import host
from pyinfra.api.exceptions import PyinfraError

from rig.facts.state import HostBasics
from rig.hostplan import HostData, HostPlan, host_plan
from rig.settings import settings_from_gpus
from rig.yaml_source import CatalogError


def current_plan() -> HostPlan:
    """Read the few facts that exist on a bare host and build its plan. One remote command.

    Raises PyinfraError, naming the host, for wrong data or a host that is not supported.
    """
    basics = host.get_fact(HostBasics)
    try:
        if basics.machine not in ("x86_64", ""):
            raise CatalogError(f"its processor is {basics.machine}; the engines are built for x86_64")
        return host_plan(_data(), basics.distribution, settings_from_gpus(len(basics.gpus)))
    except CatalogError as error:
        raise PyinfraError(f"{host.name}: {error}") from None


def _data() -> dict[str, Any]:
    return {key: host.data.get(key) for key in HostData.model_fields if hasattr(host.data, key)}


def operator_secret(file: str, what: str) -> bytes:
    """Read a secret on the operator's machine. Raises PyinfraError when it is absent, empty or open to others."""
    path = Path(file).expanduser()
    try:
        content = path.read_bytes().strip()
        mode = path.stat().st_mode & 0o077
    except OSError as error:
        raise PyinfraError(f"{host.name}: {what}: {path} cannot be read: {error.strerror}") from None
    if mode:
        raise PyinfraError(f"{host.name}: {what}: {path} is readable by others; run `chmod 600 {path}`")
    if not content or b"\n" in content:
        raise PyinfraError(f"{host.name}: {what}: {path} must hold one line, the secret")
    return content
