"""The run specification of a serving configuration (/etc/kimi-rig/configurations/<name>.json), typed."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rigctl.cli import RigctlError

DIRECTORY = Path("/etc/kimi-rig/configurations")
RUNTIME = Path("/run/kimi-rig")


@dataclass(frozen=True)
class Specification:
    """One configuration as deployed. digest covers everything the engine is started with."""

    name: str
    description: str
    engine: str
    release: str
    host: str
    port: int
    model: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    speculation: dict[str, Any] | None
    harmless_log: list[str]
    digest: str

    @property
    def unit(self) -> str:
        return f"kimi-{self.name}.service"

    @property
    def base_url(self) -> str:
        """Where this machine reaches the engine, also when it listens on every address."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # read, not bound
        host = everywhere.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def read(path: Path) -> Specification:
    """Read one specification. Raises RigctlError when it is absent or not of this version of rigctl."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Specification(**{field.name: data[field.name] for field in fields(Specification)})
    except OSError as error:
        raise RigctlError(
            f"{path} cannot be read: {error.strerror}; `rigctl status` lists the configurations"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RigctlError(f"{path} is no run specification ({error}); deploy again") from None


def named(name: str) -> Specification:
    """The specification of configuration `name` (with or without kimi- and .service)."""
    return read(DIRECTORY / f"{name.removeprefix('kimi-').removesuffix('.service')}.json")


def installed() -> list[Specification]:
    """Every configuration this host has, by name."""
    return [read(path) for path in sorted(DIRECTORY.glob("*.json"))]


def started(specification: Specification) -> dict[str, Any] | None:
    """What the running service wrote down when it was started and accepted; None while nothing runs."""
    try:
        found = json.loads((RUNTIME / specification.name / "started.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
