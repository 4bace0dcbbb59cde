"""The edge's own files run by the real HAProxy, in front of a stand-in engine: no root, no box, seconds."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from rig.artifacts.edge import CERTIFICATE, CONFIGURATION, ENGINE, HAPROXY, KEYS, edge_files, keys_map
from rig.catalog.entries import Configuration, catalogues_of
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from tests.standin import __file__ as STANDIN
from tests.support.plans import INVENTORY, gpu_plan

ENGINE_KEY = "the-engines-own-key"
NAME = "localhost"


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """What the tests start is there."""
    missing = [name for name in (HAPROXY, "openssl", "lego", "pebble") if shutil.which(name) is None]
    if missing:
        pytest.exit(f"{', '.join(missing)} missing: apt-get install haproxy openssl lego pebble", returncode=1)


@pytest.fixture(autouse=True)
def own_catalogues() -> Iterator[None]:
    with catalogues_of(INVENTORY):
        yield


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# MemoryDenyWriteExecute= of the unit: no machine code made at run time (prctl(2), PR_SET_MDWE; Linux 6.3 and newer).
AS_THE_UNIT_DOES = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Engine:
    """A stand-in engine, as its unit would run it."""

    def __init__(self, directory: Path, port: int, name: str, entry: Configuration) -> None:
        self._faults, self._directory, self.name, self.port = directory / f"{name}.faults", directory, name, port
        command = [
            sys.executable,
            STANDIN,
            "--port",
            str(port),
            "--model",
            entry.served_model_name or "kimi",
            "--faults",
            str(self._faults),
        ]
        self._process = subprocess.Popen(
            command, env={**os.environ, "VLLM_API_KEY": ENGINE_KEY}, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        while "LISTENING" not in self._process.stdout.readline():
            assert self._process.poll() is None

    def faults(self, **faults: Any) -> None:
        self._faults.write_text(json.dumps(faults))

    def accepted(self, *, yes: bool = True) -> None:
        """What the supervisor writes once it has accepted the engine, and takes away when it ends."""
        started = self._directory / "run" / self.name / "started.json"
        started.parent.mkdir(parents=True, exist_ok=True)
        if yes:
            started.write_text("{}")
        else:
            started.unlink()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Edge:
    """HAProxy with the files of a plan, below a directory of the test's."""

    def __init__(self, directory: Path, plan: HostPlan, engines: Sequence[Engine], user: str) -> None:
        self._directory = directory
        self.port = free_port()
        self._texts = {Path(path).name: text for path, text in edge_files(plan).items()}
        for name, text in self._texts.items():
            changed = text.replace(layout.EDGE, str(directory)).replace(layout.RUNTIME, str(directory / "run"))
            changed = re.sub(r"(?<=    bind )\S+", f"127.0.0.1:{self.port}", changed)
            for engine in engines:
                changed = re.sub(rf"(?<=port = )\d+(?=.*/{engine.name}/)", str(engine.port), changed)
            self._texts[name] = changed.replace(f'USER = "{plan.data.service_user}"', f'USER = "{user}"')
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.certificate = directory / "ca.pem"
        assert plan.edge is not None
        self.url = f"{'https' if plan.edge.tls else 'http'}://{NAME}:{self.port}"

    def write(self, keys: dict[str, str], *, issue: bool = True) -> None:
        """All files; keys: name -> key."""
        for name, text in self._texts.items():
            (self._directory / name).write_text(text)
        digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
        (self._directory / Path(KEYS).name).write_text(keys_map(digests))
        (self._directory / Path(ENGINE).name).write_text(f"engine {ENGINE_KEY}\n")
        if issue:
            self.issue()

    def issue(self) -> None:
        """A new certificate."""
        key = self._directory / "key.pem"
        curve = "ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        names = f"-subj /CN={NAME} -addext subjectAltName=DNS:{NAME},IP:127.0.0.1"
        command = f"openssl req -x509 -newkey {curve} {names} -keyout {key} -out {self.certificate}"
        subprocess.run(command.split(), check=True, capture_output=True)
        (self._directory / Path(CERTIFICATE).name).write_text(self.certificate.read_text() + key.read_text())

    def start(self) -> None:
        with self._log.open("wb") as log:
            command = [HAPROXY, "-Ws", "-f", str(self._directory / Path(CONFIGURATION).name)]
            command = [sys.executable, "-c", AS_THE_UNIT_DOES, *command]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._until(lambda: "Loading success" in self.log)

    def reload(self) -> None:
        """As the unit's ExecReload= does; then only the new worker takes connections."""
        assert self._process is not None
        words = ("Loading success", "Proxy edge stopped")
        before = [self.log.count(one) for one in words]
        self._process.send_signal(signal.SIGUSR2)
        self._until(lambda: all(self.log.count(one) > was for one, was in zip(words, before, strict=True)))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def after(self, requests: int) -> list[str]:
        """The access log, once so many requests are in it."""
        self._until(lambda: self.log.count(" status=") >= requests)
        return [line for line in self.log.splitlines() if " status=" in line]

    def _until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not what():
            assert self._process is not None and self._process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.02)

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def ask(self, path: str = "/v1/models", key: str | None = None, **more: Any) -> requests.Response:
        """One request; a POST with `json` or `data`."""
        headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **more.pop("headers", {})}
        method = more.pop("method", "POST" if {"json", "data"} & more.keys() else "GET")
        with requests.Session() as session:
            session.trust_env = False
            return session.request(
                method, f"{self.url}{path}", headers=headers, verify=str(self.certificate), timeout=30, **more
            )


Maker = Callable[..., tuple[Edge, Engine]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    with making(tmp_path) as maker:
        yield maker


@contextmanager
def making(tmp_path: Path) -> Iterator[Maker]:
    """Makes a running edge with the plan's engines behind it; gives the edge and the first of them.

    keys: name -> key; data: more of host data `edge`.
    """
    ended: list[Edge | Engine] = []

    def made(
        keys: dict[str, str], *, user: str = getpass.getuser(), plan: HostPlan | None = None, **data: Any
    ) -> tuple[Edge, Engine]:
        host = {"address": "127.0.0.1", "tls": {"certificate": "c", "key": "k"}, "keys": dict.fromkeys(keys, "~/k")}
        plan = plan or gpu_plan(edge={**host, **data}, configurations=["vllm-base"])
        engines = [Engine(tmp_path, free_port(), name, entry) for name, entry in plan.serving.items()]
        ended.extend(engines)
        edge = Edge(tmp_path, plan, engines, user)
        edge.write(keys)
        edge.start()
        ended.append(edge)
        for engine in engines:
            engine.accepted()
        return edge, engines[0]

    try:
        yield made
    finally:
        for one in ended:
            one.end()
