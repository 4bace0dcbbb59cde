"""The plan of the host that pyinfra is working on."""

from __future__ import annotations

from typing import Any

from pyinfra import host
from pyinfra.api.exceptions import PyinfraError

from rig.facts.state import HostBasics
from rig.hostplan import HostData, HostPlan, host_plan
from rig.secrets import SecretError, read_secret
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


def operator_secret(source: str, what: str) -> bytes:
    """A secret of the operator's (rig.secrets). Raises PyinfraError, naming the host."""
    try:
        return read_secret(source, what)
    except SecretError as error:
        raise PyinfraError(f"{host.name}: {error}") from None
