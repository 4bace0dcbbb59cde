"""Records: what this program knows of the checkpoints on this host, one JSON file each.

They live in the state directory, never in the checkpoint: an adopted directory belongs to the operator.
"""

import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rigctl.checkpoints.verify import EXTRA_CURE, Report, Seen, quick
from rigctl.contract.checkpoint_job import NAME
from rigctl.contract.manifest import Manifest
from rigctl.errors import RigctlError
from rigctl.whole_files import read_json, write_json

STATE_DIRECTORY = Path("/var/lib/kimi-rig/checkpoints")
FORMAT = 1


def check_name(name: str) -> str:
    """A checkpoint's name: lower case, digits, dot, dash, underscore; it becomes a file name."""
    if not re.fullmatch(NAME, name):
        raise RigctlError(f"checkpoint name {name!r}: use a-z, 0-9, '.', '_' and '-', at most 80")
    return name


@dataclass
class Record:
    """A checkpoint that was proved. `origin`: staged (ours) or adopted (the operator's, left as it is)."""

    name: str
    path: str
    origin: str
    manifest: Manifest
    seen: dict[str, Seen]
    verified_at: float
    verified_seconds: float
    kind: str = "target"
    read_only: bool = False
    foreign: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    digests_from: str | None = None
    """manifest, source, or files (taken as they lay or were made). None: recorded up to 0.2.0, when a hub's mirror told
    digests too."""

    def to_json(self) -> dict[str, Any]:
        unknown = {"digests_from"} if self.digests_from is None else set()
        content = {key: value for key, value in vars(self).items() if key not in {"manifest", "seen", *unknown}}
        return {
            "format": FORMAT,
            **content,
            "manifest": self.manifest.document(),
            "seen": {path: asdict(seen) for path, seen in self.seen.items()},
        }


def parse(content: Any, where: str) -> Record:
    try:
        if content["format"] != FORMAT:
            raise RigctlError(f"{where}: record format {content['format']!r}, this program reads {FORMAT}")
        return Record(
            name=content["name"],
            path=content["path"],
            origin=content["origin"],
            manifest=Manifest.parse(content["manifest"], where),
            seen={path: Seen(**seen) for path, seen in content["seen"].items()},
            verified_at=float(content["verified_at"]),
            verified_seconds=float(content["verified_seconds"]),
            kind=content["kind"],
            read_only=bool(content["read_only"]),
            foreign=list(content["foreign"]),
            damaged=dict(content["damaged"]),
            digests_from=content.get("digests_from"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RigctlError(
            f"{where} is not a record of this program ({error!r}): move it away and verify or adopt again"
        ) from error


@dataclass(frozen=True)
class State:
    """The state directory: records, job states and locks."""

    root: Path = STATE_DIRECTORY

    def record_path(self, name: str) -> Path:
        return self.root / f"{check_name(name)}.json"

    def job_path(self, name: str) -> Path:
        return self.root / "jobs" / f"{check_name(name)}.json"

    def lock_path(self, key: str) -> Path:
        return self.root / "locks" / f"{key}.lock"

    def names(self) -> list[str]:
        places = [*self.root.glob("*.json"), *(self.root / "jobs").glob("*.json")]
        return sorted({place.stem for place in places if re.fullmatch(NAME, place.stem)})

    def load(self, name: str) -> Record | None:
        place = self.record_path(name)
        return parse(read_json(place, "record"), str(place)) if place.exists() else None

    def require(self, name: str) -> Record:
        """The record, or a RigctlError that says what to do."""
        record = self.load(name)
        if record is None:
            raise RigctlError(f"no checkpoint {name!r} is recorded in {self.root}: stage or adopt it first")
        return record

    def save(self, record: Record) -> None:
        write_json(self.record_path(record.name), record.to_json())


def quick_report(record: Record) -> Report:
    """The quick verification of a record; files that the last full one found damaged stay so."""
    report = quick(Path(record.path), record.manifest, record.seen)
    report.damaged.update(record.damaged)
    return report


def fault(record: Record, report: Report) -> str | None:
    """Why a recorded checkpoint must not be served as it lies, and what to do; None where nothing is wrong."""
    if report.complete:
        return None
    if not (report.damaged or report.missing):
        return str(extra_beside(record.path, report.extra))
    again = ", or adopt it again if the change is yours" if record.origin == "adopted" else ""
    return (
        f"{record.path} is not as it was proved:\n  " + "\n  ".join(report.lines()[:20]) + "\n"
        f"prove it again (rigctl checkpoints verify --full {record.name}), repair it{again}; then deploy again"
    )


def extra_beside(directory: object, names: list[str]) -> RigctlError:
    """The message about weights in a directory that are not the checkpoint's."""
    return RigctlError(
        f"{directory} has weights that are not of the checkpoint, and an engine would load them with it: "
        f"{', '.join(names)}; {EXTRA_CURE}, then deploy again; nothing was touched"
    )


def from_environment() -> State:
    """The state directory: $RIGCTL_CHECKPOINTS, systemd's $STATE_DIRECTORY, or the default."""
    return State(Path(os.environ.get("RIGCTL_CHECKPOINTS") or STATE_DIRECTORY))
