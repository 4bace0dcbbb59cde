"""The run specification of a serving configuration (/etc/kimi-rig/configurations/<name>.json), typed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rigctl.errors import RigctlError

DIRECTORY = Path("/etc/kimi-rig/configurations")
RUNTIME = Path("/run/kimi-rig")
STATE = Path("/var/lib/kimi-rig/serving")
LOGS = Path("/var/log/kimi-rig")


@dataclass(frozen=True)
class Limits:
    """Thresholds of the supervisor; inventory/group_data/all.py documents each."""

    no_progress_minutes: float
    busy_only_minutes: float
    busy_share: float
    io_mib: float
    gpu_step_mib: float
    sample_seconds: float
    gpu_free_mib: int
    gpu_wait_seconds: float
    minimum_shm_mib: int
    minimum_disk_mib: int
    acceptance_seconds: float
    settle_seconds: float
    repeated_words: int
    repeated_share: float
    watch_seconds: float
    watch_answer_seconds: float
    frozen_minutes: float
    errors_in_a_row: int
    acceptance_floor: float
    window_drafts: int
    restarts: int
    restart_delay_seconds: float
    restart_delay_limit_seconds: float
    healthy_minutes: float
    drain_seconds: int
    stop_seconds: int
    kept_runs: int
    run_log_mib: int


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
    api_key: bool
    gpus: list[int]
    target_path: str
    drafter_path: str | None
    environment_path: str
    series: str | None
    host_settings: dict[str, Any]
    tool_call_parser: str | None
    reasoning_parser: str | None
    speculation: dict[str, Any] | None
    checkpoints: dict[str, Any]
    harmless_log: list[str]
    drain: str
    rate_counts_bonus: bool
    limits: Limits
    unit_digest: str
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

    @property
    def acceptance_floor(self) -> float:
        """Acceptance length below which the drafter costs more than it brings: measured here, or the host's default."""
        known = (self.speculation or {}).get("break_even_length")
        return float(known) if known else self.limits.acceptance_floor

    @property
    def runtime(self) -> Path:
        """Directory of this boot's facts: started.json, watch.json, metrics.prom, cause.json, failures.json."""
        return self._directory("RUNTIME_DIRECTORY", RUNTIME)

    @property
    def state(self) -> Path:
        """Directory of facts that outlive a boot: accepted.json, ended.json."""
        return self._directory("STATE_DIRECTORY", STATE)

    @property
    def logs(self) -> Path:
        """Directory of one log file a run."""
        return self._directory("LOGS_DIRECTORY", LOGS)

    def _directory(self, variable: str, parent: Path) -> Path:
        given = os.environ.get(variable)  # systemd.exec(5): set inside the unit
        return Path(given) if given else parent / self.name


def read(path: Path) -> Specification:
    """Read one specification. Raises RigctlError when it is absent or not of this version of rigctl."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        limits = Limits(**{field.name: data["limits"][field.name] for field in fields(Limits)})
        known = {field.name: data[field.name] for field in fields(Specification) if field.name != "limits"}
        return Specification(**known, limits=limits)
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
    return read_json(specification.runtime / "started.json")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when it is absent or unreadable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object in one step."""
    write_text(path, json.dumps(content) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.chmod(0o644)  # no secrets in there; anyone may ask `rigctl status`
    temporary.replace(path)
