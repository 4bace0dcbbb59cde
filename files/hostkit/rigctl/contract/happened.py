"""What a unit writes down of its run, for commands of root's: read as foreign text, since the engine is the same user.

Only what is named here is taken over, each value of its type. One that the version before wrote may have fewer keys.
"""

import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rigctl.contract.order import faults
from rigctl.errors import RigctlError
from rigctl.guarded import Place


class Unreadable(RigctlError):
    """A record is there and cannot be used: says which, and why."""


class Happened(BaseModel):
    """One record: a JSON object in a file of this name."""

    FILE: ClassVar[str]
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, place: Place) -> Self | None:
        """The record in a unit's directory; None where there is none. Raises Unreadable."""
        where = f"{place}/{cls.FILE}"
        try:
            # Nested more than 200 levels deep is a fault of its own (pydantic's parser).
            return cls.model_validate_json(place.read(cls.FILE))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise Unreadable(f"{where}: not a record of a unit: {'; '.join([*faults(error, cls, {})][:3])}") from None
        except OSError as error:
            raise Unreadable(f"{error.filename or where} is not read: {error.strerror}") from None

    @classmethod
    def known(cls, place: Place) -> Self | None:
        """`read`, with None also for one that cannot be used."""
        try:
            return cls.read(place)
        except Unreadable:
            return None


class Routes(BaseModel):
    """Of `Proved`: what the routes of the engine ask a key for."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    open_without_key: list[str] = []


class Proved(BaseModel):
    """What an engine proved before it was accepted, by probe."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    routes: Routes = Routes()


class Started(Happened):
    """What the service that runs was started with, and how it was accepted. Times: seconds, Unix and monotonic."""

    FILE = "started.json"

    digest: str
    same_as: list[str] = []
    release: str | None = None
    prechecks: dict[str, str] = {}
    checkpoints: dict[str, str] = {}
    noticed_at: float | None = None
    load_seconds: float | None = None
    probe_seconds: float | None = None
    accepted_at: int
    accepted_monotonic: float = 0
    proved: Proved = Proved()


class Watched(Happened):
    """What the supervisor last saw of an engine that serves."""

    FILE = "watch.json"

    answered_seconds: float | None = None
    errors: list[str] = []
    acceptance_length: float | None = None
    acceptance_floor: float | None = None
    below_floor: bool = False
    own_rate: float | None = None
    own_rate_is: str | None = None


class Cause(Happened):
    """Why a run fails, as its supervisor knows it before the end."""

    FILE = "cause.json"

    cause: str
    last_words: list[str] = []


class Failures(Happened):
    """Causes of the failures in a row. monotonic: seconds, of the last one."""

    FILE = "failures.json"

    failures: list[str] = []
    monotonic: float | None = None


class Accepted(Happened):
    """When an engine of this configuration was accepted last (Unix seconds)."""

    FILE = "accepted.json"

    at: float
    digest: str | None = None


class Ended(Happened):
    """How the last run ended. since_boot: id of the boot, monotonic seconds."""

    FILE = "ended.json"

    at: float = 0
    since_boot: tuple[str, float] = ("", 0.0)
    result: str | None = None
    cause: str | None = None
    accepted: bool = False
    accepted_boot: str | None = None
    failures: int = 0
    killed: list[str] = []
    left: list[str] = []
    last_words: list[str] = []


class Fallback(Happened):
    """The last fallback of the host. to: the configurations that were started again. began: when it was decided."""

    FILE = "fallback.json"

    at: float
    failed: str
    cause: str = ""
    outcome: str = ""
    to: list[str] = []
    began: float = 0


def record_text(content: dict[str, Any]) -> bytes:
    """A record as it is written."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
