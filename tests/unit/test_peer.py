"""Who listens is known before the API key is sent: no sender gives it to a process outside the unit."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from rig.catalog.entries import ROOT
from rigctl.bench import counters, load, profile
from rigctl.contract.sweep import Workload
from rigctl.services import switching
from rigctl.supervisor import listening
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine, engine_of
from rigctl.supervisor.listening import StrangerAnswers, accepted_by
from rigctl.supervisor.readiness import NotAccepted, accept
from rigctl.supervisor.watchdog import Watch
from tests.unit.serving import Run, specification
from tests.unit.test_acceptance import Standin

KEY = "s3cret-key"
WORKLOAD = Workload(
    id="w",
    prompts="short",
    context=0,
    concurrency=1,
    requests=1,
    output_tokens=8,
    temperature=0,
    top_p=1,
    ignore_eos=True,
    seed=1,
)
STRANGER = """
import socket, sys, threading
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
print(listener.getsockname()[1], flush=True)
def answer(connection):
    while data := connection.recv(65536):
        print(data, flush=True)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
while True:
    threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
"""


class Stranger:
    """A process outside the unit that holds the engine's port, and writes down what it hears."""

    def __init__(self, heard: Path, port: int = 0) -> None:
        self.file = heard
        with heard.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-c", STRANGER, str(port)], stdout=file)
        while not self.file.read_text().endswith("\n"):
            time.sleep(0.01)
        self.port = int(self.file.read_text().split()[0])

    @property
    def heard(self) -> str:
        return self.file.read_text().partition("\n")[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    made = Stranger(tmp_path / "heard")
    yield made
    made.close()


def generator(engine: Engine, directory: Path) -> None:
    program = directory / "aiperf"
    program.write_text(f"#!/bin/sh\nenv > {directory}/environment\n")
    program.chmod(0o755)
    load.Generator(str(program), 5).measure(WORKLOAD, engine, ["x"], directory / "round")


SENDERS: dict[str, Callable[[Engine, Path], object]] = {
    "readiness": lambda engine, _: engine.ready(),
    "acceptance": lambda engine, _: accept(engine),
    "chat": lambda engine, _: engine.chat([{"role": "user", "content": "Hello"}], timeout=3),
    "watchdog": lambda engine, _: Watch(engine).round(),
    "restart --when-idle": lambda engine, _: switching._idle(engine),
    "warm-up": lambda engine, _: load.warm(engine, WORKLOAD, ["x"], 3),
    "counters": lambda engine, _: counters.read(engine),
    "profiler": lambda engine, _: profile.start(engine),
    "load generator": generator,
}


@pytest.mark.parametrize("sender", SENDERS)
def test_a_stranger_on_the_port_hears_nothing(stranger: Stranger, tmp_path: Path, sender: str) -> None:
    spec = specification(port=stranger.port, api_key=True, speculation=None)
    try:
        SENDERS[sender](Engine(spec, KEY, lambda: [os.getpid()]), tmp_path)
    except (*BAD_ANSWERS, NotAccepted, profile.ProfileFailed) as error:
        assert "outside this unit" in str(error)
    assert stranger.heard == ""
    assert not (tmp_path / "environment").exists()


def test_without_a_key_there_is_no_secret(stranger: Stranger) -> None:
    assert Engine(specification(port=stranger.port), processes=lambda: []).metrics_text() == "{}"


def test_the_unit_gets_the_key(tmp_path: Path) -> None:
    standin = Standin(tmp_path)
    standin.state.key = KEY
    engine = Engine(specification(port=standin.server.server_address[1]), KEY, lambda: [os.getpid()])
    assert engine.models() == ["stand-in"] == engine.anew().models()
    assert engine.prove() == os.getpid()
    generator_ends = pytest.raises(load.LoadFailed, match="aiperf ended")
    with generator_ends:
        generator(engine, tmp_path)
    assert KEY in (tmp_path / "environment").read_text()
    standin.server.shutdown()
    standin.server.server_close()


def test_a_connection_that_nobody_accepts_is_only_slow() -> None:
    """An engine that loads may let it wait; a listener that is gone by then has heard nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = Engine(specification(port=listener.getsockname()[1]), KEY, lambda: [os.getpid()])
        with pytest.raises(requests.ConnectTimeout, match="nobody has accepted"):
            engine.models(timeout=0.2)
        assert engine.ready(timeout=0.1) is False
        connection, _ = listener.accept()
        connection.settimeout(1)
        assert connection.recv(1000) == b""
        connection.close()


@pytest.mark.parametrize(
    ("family", "at", "to"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::", "127.0.0.1"), (socket.AF_INET6, "::1", "::1")],
)
def test_every_kind_of_address_is_found_in_the_table(family: socket.AddressFamily, at: str, to: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((at, 0))
        listener.listen()
        with socket.create_connection((to, listener.getsockname()[1])) as ours:
            threading.Timer(0.1, lambda: accepted.append(listener.accept()[0])).start()
            accepted: list[socket.socket] = []
            assert accepted_by(ours, lambda: [1, os.getpid()], 5) == os.getpid()
            with pytest.raises(StrangerAnswers, match="outside this unit"):
                accepted_by(ours, lambda: [1], 5)
            accepted[0].close()


@given(st.ip_addresses(), st.integers(0, 65535))
def test_addresses_of_the_table_are_read_as_the_kernel_writes_them(address: object, port: int) -> None:
    packed = address.packed  # type: ignore[attr-defined]  # both kinds have it
    words = "".join(f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4))
    assert listening._from_table(f"{words}:{port:04X}") == listening._place(packed, port)


def test_the_unit_of_a_command_is_systemds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: Stranger) -> None:
    """`rigctl chat`, `restart`, the benchmark and `make verify` ask systemd for the unit's main process."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho {os.getpid()}\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = specification(port=stranger.port)
    key = tmp_path / asked.unit / "api-key"
    key.parent.mkdir()
    key.write_text(KEY)
    monkeypatch.setattr("rigctl.supervisor.engine_client.GIVEN", tmp_path)
    engine = engine_of(asked)
    assert engine.metrics_text() == "{}", "outside a unit it is a child of the main process"
    assert KEY in stranger.heard
    systemctl.write_text("#!/bin/sh\necho 0\n")
    with pytest.raises(StrangerAnswers):
        engine.anew().models()


def test_a_port_that_is_taken_while_the_engine_loads_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "api-key").write_text(KEY)
    run = Run(tmp_path, {"load": [["log", "Loading"], ["sleep", 2]]}, api_key=True)
    run.until("STATUS=starting")
    stranger = Stranger(tmp_path / "heard", run.port)
    try:
        assert run.end() == 78
        assert "is answered by a process outside this unit" in run.json("cause.json")["cause"]
        assert stranger.heard == ""
    finally:
        stranger.close()


KNOWN = {
    "files/hostkit/rigctl/supervisor/engine_client.py": "the engine's API key, over proved connections",
    "files/hostkit/rigctl/checkpoints/http.py": "the hub's token, over https",
    "rig/cli/connect.py": "a line for the operator's own shell",
    "files/hostkit/rigctl/bench/load.py": "the API key's variable of the load generator",
}


def test_every_place_that_sends_a_secret_is_known() -> None:
    sends = re.compile(r"Bearer|Authorization|api_key\(\)|\"api_key\":|HTTPDigestAuth|HTTPBasicAuth")
    places = [
        path for top in ("rig", "tasks", "files/hostkit/rigctl", "inventory") for path in (ROOT / top).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)) for path in places if sends.search(path.read_text())}
    more = {"files/hostkit/rigctl/supervisor/serve.py"}  # hand it to Engine
    names = {"rig/artifacts/units.py", "files/hostkit/rigctl/services/status.py"}  # whether there is one
    assert found - more - names == set(KNOWN), "a new sender of a secret needs a row in SENDERS and a name in KNOWN"
