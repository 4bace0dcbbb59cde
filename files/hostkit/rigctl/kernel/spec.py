"""The specification of one kernel wheel: /etc/kimi-rig/kernels/<release>.json, written by the deploy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rigctl.errors import RigctlError

FOLDER = Path("/etc/kimi-rig/kernels")


@dataclass(frozen=True)
class Source:
    """Where the source is: a directory on this host, or a commit (full sha) of a git repository.

    mirror: an address or bundle file that is asked before `url`.
    """

    kind: Literal["directory", "git"]
    path: Path | None = None
    url: str | None = None
    commit: str | None = None
    mirror: str | None = None
    submodules: bool = False


@dataclass(frozen=True)
class Toolchain:
    """path: the environment made from `lock`. cuda_home: a toolkit that is there; None: that of the environment."""

    path: Path
    lock: Path
    cuda_home: Path | None = None


@dataclass(frozen=True)
class Dependency:
    """A directory for FetchContent. private: configuration writes into it, so it gets a copy."""

    path: Path
    private: bool = False


@dataclass(frozen=True)
class Spec:
    """One kernel library of one engine environment. Paths are of this host; memory in MiB."""

    name: str
    mode: Literal["wheel", "source"]
    environment: Path
    python: str
    lock: Path
    series: Path | None
    package: str
    module: str
    libraries: tuple[str, ...]
    """Patterns below site-packages of libraries that must hold code for every wanted architecture."""
    toolchain: Toolchain
    root: Path
    """Store, work directories and compiler cache."""
    source: Source | None = None
    subdirectory: str = "."
    patches: Path | None = None
    architectures: tuple[str, ...] = ()
    """Compute capabilities, such as "12.0"; none: those of this host's GPUs."""
    minimum_cuda: str = "12.8"
    defines: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    drop_targets: tuple[str, ...] = ()
    dependencies: Mapping[str, Dependency] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    """Memory that compiling a source file takes, by file name; "default" for the others."""
    jobs: int | None = None
    while_serving: Literal["refuse", "share"] = "refuse"
    shared: str | None = None
    """A directory, or HOST:DIRECTORY for rsync, from which wheels are fetched and to which they are put."""
    minimum_disk: int = 4096
    wheels: Path | None = None
    """Directory that has every wheel of the toolchain's lock; no index is asked then."""


def parse(text: str, where: str) -> Spec:
    """The specification in a JSON text. Raises RigctlError, naming `where`, when it is not one."""
    try:
        data: dict[str, Any] = json.loads(text)
        unknown = data.keys() - {each.name for each in fields(Spec)}
        if unknown:
            raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
        data |= {key: Path(data[key]) for key in ("environment", "lock", "root")}
        data |= {key: Path(data[key]) for key in ("series", "patches", "wheels") if data.get(key)}
        data |= {key: tuple(data[key]) for key in ("libraries", "architectures", "drop_targets") if key in data}
        toolchain = data["toolchain"]
        home = toolchain.get("cuda_home")
        data["toolchain"] = Toolchain(Path(toolchain["path"]), Path(toolchain["lock"]), Path(home) if home else None)
        if source := data.get("source"):
            data["source"] = Source(**{**source, "path": Path(source["path"]) if source.get("path") else None})
        data["dependencies"] = {
            name: Dependency(Path(each["path"]), bool(each.get("private")))
            for name, each in data.get("dependencies", {}).items()
        }
        spec = Spec(**data)
        if spec.mode == "source" and spec.source is None:
            raise ValueError("mode source without a source")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RigctlError(f"{where}: not a kernel specification: {error}") from None
    return spec


def read(name: str) -> Spec:
    """The specification of a release, by its name or by the path of its file."""
    path = Path(name) if "/" in name else FOLDER / f"{name}.json"
    try:
        return parse(path.read_text(), str(path))
    except OSError as error:
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.json"))) or "none"
        raise RigctlError(f"{path}: {error.strerror} (releases with a kernel on this host: {known})") from None
