"""The job description that the deploy writes for one checkpoint (JSON), checked key by key.

Durations are seconds, sizes bytes, rates bytes a second. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from rigctl.checkpoints.paths import read_json
from rigctl.checkpoints.record import check_name
from rigctl.errors import RigctlError

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Secret:
    """Where a secret is: a systemd credential's name, or a file that only its owner reads."""

    credential: str | None = None
    file: str | None = None

    def path(self) -> Path:
        """The file that holds it."""
        if (self.credential is None) == (self.file is None):
            raise RigctlError("a secret is either a credential or a file")
        if self.file is not None:
            return Path(self.file)
        directory = os.environ.get("CREDENTIALS_DIRECTORY")
        if not directory:
            raise RigctlError(
                f"credential {self.credential!r} is wanted, but $CREDENTIALS_DIRECTORY is not set: "
                "start the job through its systemd unit (LoadCredential=)"
            )
        return Path(directory) / str(self.credential)

    def read(self) -> str:
        """The secret's text; never log it."""
        place = self.path()
        try:
            if self.file is not None and place.stat().st_mode & 0o077:
                raise RigctlError(f"{place} can be read by others: chmod 600 it")
            text = place.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RigctlError(f"secret {place} cannot be read: {error.strerror}") from error
        if not text:
            raise RigctlError(f"secret {place} is empty")
        return text


@dataclass(frozen=True)
class HubSource:
    """A hub repository. `transfer`: http (resumes inside a file), xet (the hub's chunked transfer, falls back
    to http), or auto (xet for large files that the hub offers it for, where no bandwidth limit is set)."""

    repository: str
    revision: str | None = None
    endpoint: str | None = None
    mirror: str | None = None
    token: Secret | None = None
    transfer: Literal["auto", "http", "xet"] = "auto"
    allow_unpinned: bool = False
    type: Literal["hub"] = "hub"


@dataclass(frozen=True)
class HttpSource:
    """A directory on a web server; its manifest is at `manifest_url` or `url`/manifest.json."""

    url: str
    manifest_url: str | None = None
    mirror: str | None = None
    token: Secret | None = None
    type: Literal["http"] = "http"


@dataclass(frozen=True)
class LocalSource:
    """A directory of this host."""

    path: str
    type: Literal["local"] = "local"


@dataclass(frozen=True)
class RsyncSource:
    """A directory of another host over SSH (no `host`: of this one), fetched with rsync."""

    path: str
    host: str | None = None
    user: str | None = None
    port: int = 22
    identity: Secret | None = None
    known_hosts: str | None = None
    type: Literal["rsync"] = "rsync"


@dataclass(frozen=True)
class GeneratorSource:
    """A `rigctl` subcommand that makes the files; `{directory}` in an argument is the directory it must make.
    `revision` names the generator's own version: another one makes another checkpoint."""

    arguments: tuple[str, ...]
    revision: str | None = None
    type: Literal["generator"] = "generator"


Source = Union[HubSource, HttpSource, LocalSource, RsyncSource, GeneratorSource]  # noqa: UP007
SOURCES: dict[str, type[Any]] = {
    "hub": HubSource,
    "http": HttpSource,
    "local": LocalSource,
    "rsync": RsyncSource,
    "generator": GeneratorSource,
}


@dataclass(frozen=True)
class Spec:
    """One checkpoint: where from, where to, which files, and how it is left."""

    name: str
    destination: str
    source: Source
    kind: Literal["target", "drafter"] = "target"
    manifest: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)  # path -> sha256 known from elsewhere
    owner: str | None = None
    group: str | None = None
    read_only: bool = True
    replace: bool = False  # another revision may take the place of one that this program staged
    workers: int = 8
    bandwidth_limit: int | None = None
    reserve_bytes: int = 1 << 30
    reserve_inodes: int = 1000
    retries: int = 8
    backoff: float = 1.0
    stall: float = 60.0

    def directory(self) -> Path:
        """The destination with links followed: a link stays, the directory it leads to is filled."""
        place = Path(self.destination)
        try:
            return place.resolve()
        except (RuntimeError, OSError) as error:
            raise RigctlError(f"{place} cannot be resolved: {error}") from error


def load(path: Path) -> Spec:
    """Read and check a spec file."""
    return parse(read_json(path, "spec"), str(path))


def parse(content: Any, where: str) -> Spec:
    """Check the JSON form; every fault names `where` and the key."""
    spec: Spec = _build(Spec, content, where)
    check_name(spec.name)
    if not spec.destination.startswith("/") or Path(spec.destination) == Path("/"):
        raise RigctlError(f"{where}: destination must be an absolute directory, not {spec.destination!r}")
    if ".." in Path(spec.destination).parts:
        raise RigctlError(f"{where}: destination {spec.destination!r} must not contain '..'")
    for key in ("workers", "backoff", "stall"):
        if getattr(spec, key) <= 0:
            raise RigctlError(f"{where}: {key} must be more than 0")
    if spec.retries < 0 or spec.reserve_bytes < 0 or spec.reserve_inodes < 0:
        raise RigctlError(f"{where}: retries and reserves cannot be negative")
    if spec.bandwidth_limit is not None and spec.bandwidth_limit <= 0:
        raise RigctlError(f"{where}: bandwidth_limit must be more than 0 bytes a second, or left out")
    for path, digest in spec.digests.items():
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise RigctlError(f"{where}: digests: {path}: {digest!r} is not a sha256")
    _check_source(spec.source, where)
    return spec


def _check_source(source: Source, where: str) -> None:
    if isinstance(source, HubSource):
        if source.revision is not None and not COMMIT.fullmatch(source.revision):
            raise RigctlError(f"{where}: revision {source.revision!r} is a moving name: pin the commit (40 hex digits)")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", source.repository):
            raise RigctlError(f"{where}: repository {source.repository!r} must be owner/name")
    if isinstance(source, HubSource | HttpSource):
        urls = [source.mirror, getattr(source, "endpoint", None), getattr(source, "url", None)]
        for url in filter(None, urls):
            if not str(url).startswith(("http://", "https://")):
                raise RigctlError(f"{where}: {url!r} is not an http address")
    if isinstance(source, RsyncSource):
        for text in (source.host, source.user):
            if text is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", text):
                raise RigctlError(f"{where}: {text!r} is not a host or user name")
    if isinstance(source, LocalSource | RsyncSource) and not source.path.startswith("/"):
        raise RigctlError(f"{where}: the source's path {source.path!r} must be absolute")


def _build(kind: type[Any], content: Any, where: str) -> Any:
    if not isinstance(content, Mapping):
        raise RigctlError(f"{where}: must be a JSON object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in content:
        if key not in fields:
            raise RigctlError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in content:
            values[name] = _value(hints[name], content[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RigctlError(f"{where}: {name} is missing")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:  # noqa: PLR0911, PLR0912 one return a kind of type
    if hint is Source:
        if not isinstance(value, Mapping) or value.get("type") not in SOURCES:
            raise RigctlError(f"{where}: type must be one of {', '.join(SOURCES)}")
        return _build(SOURCES[value["type"]], value, where)
    if typing.get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        return _value(next(part for part in typing.get_args(hint) if part is not type(None)), value, where)
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise RigctlError(f"{where}: {value!r} is none of {', '.join(map(str, typing.get_args(hint)))}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RigctlError(f"{where}: must be a list of texts")
        return tuple(value)
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
            raise RigctlError(f"{where}: must be an object of texts")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise RigctlError(f"{where}: must be {hint.__name__}, not {value!r}")
    return value
