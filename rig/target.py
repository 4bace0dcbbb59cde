"""The plan of the host that pyinfra is working on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyinfra import host
from pyinfra.api.exceptions import PyinfraError

from rig.facts.report import HostReport
from rig.facts.state import HostBasics
from rig.hostplan import HostData, HostPlan, data_paths, host_plan, model_folders, plan_from_facts
from rig.secrets import SecretError, read_secret
from rig.settings import settings_from_gpus
from rig.yaml_source import CatalogError


def current_plan() -> HostPlan:
    """Read the host, bare or not, and build its plan. One remote command.

    A host without python3 is planned from the little that sh can read, and decided in full by the next deploy.
    Raises PyinfraError, naming the host, for wrong data or a host that is not supported.
    """
    data = _data()
    try:
        facts = host.get_fact(
            HostReport, paths=data_paths(data), models=model_folders(data), probes=data.get("probes") or []
        )
        if facts.machine not in ("x86_64", None):
            raise CatalogError(f"its processor is {facts.machine}; the engines are built for x86_64")
        if "host" not in facts.unknown:
            return plan_from_facts(data, facts)
        basics = host.get_fact(HostBasics)
        return replace(host_plan(data, basics.distribution, settings_from_gpus(len(basics.gpus))), facts=facts)
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
