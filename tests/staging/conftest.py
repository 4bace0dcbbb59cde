"""A synthetic checkpoint on a loopback hub. Sizes: STAGING_SHARDS (64) and STAGING_SHARD_BYTES (64 KiB);
`make test-staging` sets the latter to 64 MiB, which makes 4 GiB."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rigctl.checkpoints import record, staging
from rigctl.checkpoints.progress import Progress
from rigctl.contract.checkpoint_job import CheckpointJob
from tests.staging import synthetic
from tests.staging.hubserver import COMMIT, REPOSITORY, Hub
from tests.staging.proxy import Proxy
from tests.support.certificates import authority_file

SHARDS = int(os.environ.get("STAGING_SHARDS", "64"))
SHARD_BYTES = int(os.environ.get("STAGING_SHARD_BYTES", str(64 << 10)))


@pytest.fixture(scope="session", autouse=True)
def _certificates() -> Iterator[None]:
    """Every hub of these tests speaks https."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority_file()))
        yield


@pytest.fixture(autouse=True)
def _without_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No systemd is asked: tests/breaker and tests/sandbox do."""
    monkeypatch.setattr("rigctl.builder._confined", False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the hub; tests never change them."""
    root = tmp_path_factory.mktemp("hub") / "tiny"
    yield synthetic.make(root, SHARDS, SHARD_BYTES)
    shutil.rmtree(root)


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    """A fresh server: no faults, nothing counted."""
    server = Hub(checkpoint)
    server.manifest()  # hashed here, not while a client waits
    yield server
    server.close()


@pytest.fixture
def proxy(hub: Hub) -> Iterator[Proxy]:
    """A line to the hub's front, plain files included."""
    line = Proxy(hub.hub.server_port)
    yield line
    line.close()


@dataclass
class Bench:
    """One host: a state directory, a place for checkpoints, and a way to run jobs."""

    root: Path
    state: record.State
    events: list[str] = field(default_factory=list)
    progress: Progress | None = None

    @property
    def destination(self) -> Path:
        """Where the checkpoint goes."""
        return self.root / "models" / "tiny"

    @property
    def partial(self) -> Path:
        """The workplace beside it."""
        return self.root / "models" / ".tiny.partial"

    def spec(self, source: dict[str, Any], **keys: Any) -> CheckpointJob:
        """A checked spec with quick retries."""
        content = {
            "format": CheckpointJob.FORMAT,
            "name": "tiny",
            "destination": str(self.destination),
            "source": source,
            "reserve_bytes": 0,
            "reserve_inodes": 0,
            "backoff": 0.02,
            "stall": 5.0,
            **keys,
        }
        return CheckpointJob.parse(content, "test")

    def job(self, wanted: CheckpointJob, stop: threading.Event | None = None) -> staging.Job:
        """A job whose events are kept."""
        self.progress = Progress(wanted.name, events=self.events)
        return staging.Job(wanted, self.state, self.progress, stop or threading.Event())

    def pin(self, hub: Hub) -> str:
        """The hub's manifest as a file, as `pin` writes it."""
        place = self.root / "manifest.json"
        listed = self.job(self.spec(hub_source(hub.address))).source.listing()
        assert listed is not None
        place.write_text(json.dumps(listed.document()))
        return str(place)

    def stage(self, source: dict[str, Any], **keys: Any) -> staging.Outcome:
        """Run a staging job to its end."""
        return self.job(self.spec(source, **keys)).stage()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Files are removed at once: the long set needs the room."""
    (tmp_path / "models").mkdir()
    yield Bench(tmp_path, record.State(tmp_path / "state"))
    shutil.rmtree(tmp_path, ignore_errors=True)


def hub_source(address: str, **keys: Any) -> dict[str, Any]:
    """The hub source of the synthetic repository."""
    return {"kind": "hub", "repository": REPOSITORY, "revision": COMMIT, "endpoint": address, **keys}


def http_source(address: str, **keys: Any) -> dict[str, Any]:
    """The same files as a plain web directory."""
    return {"kind": "http", "url": f"{address}/plain", **keys}


def same_files(one: Path, other: Path) -> bool:
    """Byte for byte, and nothing more or less."""
    left = sorted(place.relative_to(one) for place in one.rglob("*") if place.is_file())
    right = sorted(place.relative_to(other) for place in other.rglob("*") if place.is_file())
    return left == right and all(_equal(one / path, other / path) for path in left)


def _equal(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while True:
            a, b = left.read(1 << 20), right.read(1 << 20)
            if a != b:
                return False
            if not a:
                return True
