"""What `make verify` claims of an edge: each claim fails on an edge that breaks it."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import ssl
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rig.artifacts.edge import UNIT
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from tests.host import edge_probe, test_host
from tests.host.conftest import Target
from tests.support.certificates import server_context
from tests.support.plans import gpu_plan

ENGINE = "kimi-vllm-base.service"
DIGEST = hashlib.sha256(b"alices").hexdigest()


class Answers(BaseHTTPRequestHandler):
    """An edge as it should be, but for what a test changes."""

    no_key, wrong_key, there = 401, 401, ()
    ANY: ClassVar[bytes] = b"{}"

    def do_GET(self) -> None:
        key = self.wrong_key if self.headers["Authorization"] else self.no_key
        self.send_response(200 if self.path in self.there else key if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(self.ANY)))
        self.end_headers()
        self.wfile.write(self.ANY)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Handshakes in old versions of TLS fail here: they are the test."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answers) as server:
        server.socket = server_context().wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def edge(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What answers at the address of `target`; the host has no listener of ours but this one."""
    handler: Any = type("Handler", (Answers,), {"server_port": server.server_port})
    monkeypatch.setattr(server, "RequestHandlerClass", handler)
    listening(monkeypatch, (layout.EDGE_UNIT, "*", server.server_port))
    return handler


def listening(monkeypatch: pytest.MonkeyPatch, *sockets: tuple[str, str, int]) -> None:
    """Sockets of our units; the host has the address 192.0.2.7, and whatever listens there is reached."""
    monkeypatch.setattr(edge_probe, "SECONDS", 60)
    monkeypatch.setattr(edge_probe, "listeners", lambda: iter(sockets))
    shown = json.dumps([{"addr_info": [{"local": "192.0.2.7", "scope": "global"}]}])
    monkeypatch.setattr(edge_probe.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=shown))
    connect = edge_probe.socket.create_connection
    reached = lambda place, *more: io.BytesIO() if place[0] == "192.0.2.7" else connect(place, *more)  # noqa: E731
    monkeypatch.setattr(edge_probe.socket, "create_connection", reached)


@cache
def plan(port: int) -> HostPlan:
    certificate = {"certificate": "c", "key": "k"}
    data = {"address": "127.0.0.1", "port": port, "tls": certificate, "keys": {"alice": f"sha256:{DIGEST}"}}
    return gpu_plan(edge=data, configurations=["vllm-base"])


def target(port: int, said: str = "", **host: Any) -> Target:
    """A host on which the probe runs in this process, and every other command says `said`."""

    def run(command: str, *_: str) -> Any:
        words, output = shlex.split(command), io.StringIO(said)
        if "edge_probe" in command or "Runs on the host by itself" in command:
            with redirect_stdout(output := io.StringIO()), pytest.MonkeyPatch.context() as patch:
                patch.setattr(edge_probe.sys, "argv", words[2:])
                edge_probe.main()
        return SimpleNamespace(rc=0, stdout=output.getvalue(), stderr="")

    return Target("gpu", SimpleNamespace(run=run, **host), plan(port), {}, {"files": {UNIT: ""}})


def test_a_right_edge_holds(edge: Any) -> None:
    test_host.test_edge_is_all_that_others_reach(target(edge.server_port))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"no_key": 200}, "asks for no key"),
        ({"wrong_key": 200}, "asks for no key"),
        ({"no_key": 404}, "asks for no key"),
        *(({"there": (path,)}, f"lets {path} through") for path in test_host.NOT_THERE),
    ],
)
def test_an_edge_that_lets_in_what_it_should_not(edge: Any, broken: dict[str, Any], why: str) -> None:
    for name, value in broken.items():
        setattr(edge, name, value)
    with pytest.raises(AssertionError, match=why):
        test_host.test_edge_is_all_that_others_reach(target(edge.server_port))


def test_old_tls(edge: Any) -> None:
    context = server_context()
    before = context.minimum_version
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    try:
        with pytest.raises(AssertionError, match=r"speaks .*TLSv1\.1"):
            test_host.test_edge_is_all_that_others_reach(target(edge.server_port))
    finally:
        context.minimum_version = before


@pytest.mark.parametrize(
    ("address", "port", "reached"),
    [("*", 8000, True), ("192.0.2.7", 8000, True), ("*", None, True), ("127.0.0.1", 8000, False), ("::1", None, False)],
)
def test_another_port(
    edge: Any, monkeypatch: pytest.MonkeyPatch, address: str, port: int | None, reached: bool
) -> None:
    """port: None for the edge's own number, at another address."""
    listening(
        monkeypatch, (layout.EDGE_UNIT, "127.0.0.1", edge.server_port), (ENGINE, address, port or edge.server_port)
    )
    if not reached:
        test_host.test_edge_is_all_that_others_reach(target(edge.server_port))
        return
    with pytest.raises(AssertionError, match=f"not through the edge: {ENGINE} at 192.0.2.7:"):
        test_host.test_edge_is_all_that_others_reach(target(edge.server_port))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (f"{DIGEST.upper()} alice\n", None),
        (f"{DIGEST.upper()} alice\n{DIGEST.upper()} bob\n", "other keys"),
        ("", "other keys"),
        (f"{DIGEST[::-1].upper()} alice\n", "another key alice"),
    ],
)
def test_a_revoked_key(keys: str, why: str | None) -> None:
    if why is None:
        test_host.test_edge_lets_in_whom_the_data_names(target(8443, keys))
        return
    with pytest.raises(AssertionError, match=why):
        test_host.test_edge_lets_in_whom_the_data_names(target(8443, keys))


@pytest.mark.parametrize("said", ["", "/etc/kimi-rig/edge/keys.map\n"])
def test_a_revoked_key_that_the_edge_has_not_read_again(said: str) -> None:
    properties = {
        "ActiveState": "active",
        "UnitFileState": "enabled",
        "NeedDaemonReload": "no",
        "User": layout.EDGE_USER,
    }
    host: dict[str, Any] = {
        "package": lambda _: SimpleNamespace(is_installed=True),
        "service": lambda _: SimpleNamespace(systemd_properties=properties),
        "file": lambda _: SimpleNamespace(user="root", group=layout.EDGE_USER, mode=0o640),
    }
    if not said:
        test_host.test_edge_runs_as_deployed(target(8443, said, **host))
        return
    with pytest.raises(AssertionError, match="has not read"):
        test_host.test_edge_runs_as_deployed(target(8443, said, **host))
