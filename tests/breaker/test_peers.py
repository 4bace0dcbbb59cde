"""What a local user at the engine's port, a hostile mirror, one on the line, and a hostile host achieve: nothing.

As root, with another user's processes; no box. `make test-breaker`.
"""

from __future__ import annotations

import gzip
import json
import os
import pwd
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from rig.__main__ import main as kimi_rig
from rig.cli import status
from rigctl.errors import RigctlError
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine
from tests.staging import conftest as staging
from tests.staging.conftest import Bench, http_source, hub_source
from tests.staging.hubserver import TOKEN, Hub
from tests.support.certificates import authority_file, server_context
from tests.unit.serving import Run, free_port, specification
from tests.unit.test_gate import HOSTILE, assert_harmless
from tests.unit.test_people import DATA

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user: needs root")
bench, checkpoint, hub, certificates = staging.bench, staging.checkpoint, staging.hub, staging._certificates

KEY = "s3cret-key"
PORT_HOLDER = """
import os, socket, sys, threading, time
uid, port, how, heard = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], open(sys.argv[4], "ab", buffering=0)
os.setgroups([]); os.setgid(uid); os.setuid(uid)
family = socket.AF_INET6 if how == "mapped" else socket.AF_INET
listener = socket.socket(family)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if how != "mapped":
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("::" if how == "mapped" else "127.0.0.1", port))
listener.listen()
print("listens", flush=True)
ANSWER = b'HTTP/1.1 200 OK\\r\\nContent-Length: 34\\r\\n\\r\\n{"data": [{"id": "stand-in"}]}    '
def serve(connection):
    if how == "answers unasked":
        connection.sendall(ANSWER)
    if how == "closes at once":
        return connection.close()
    if how == "closes after a moment":
        time.sleep(0.05); return connection.close()
    while data := connection.recv(65536):
        heard.write(data)
        connection.sendall(ANSWER)
if how == "never accepts":
    time.sleep(600)
while True:
    connection, _ = listener.accept()
    if how == "in a child" and os.fork() == 0:
        listener.close(); serve(connection); os._exit(0)
    if how != "in a child":
        threading.Thread(target=serve, args=(connection,), daemon=True).start()
"""
WAYS = [
    "plainly",
    "answers unasked",
    "closes at once",
    "closes after a moment",
    "never accepts",
    "in a child",
    "mapped",
]


class Holder:
    """A process of user nobody that holds a port."""

    def __init__(self, directory: Path, how: str, port: int) -> None:
        self.heard = directory / "heard"
        self.heard.touch()
        self.heard.chmod(0o666)
        directory.chmod(0o755)
        for parent in directory.parents:
            if parent.stat().st_uid == 0 and parent != Path("/") and parent.name.startswith("pytest"):
                parent.chmod(0o755)
        uid = str(pwd.getpwnam("nobody").pw_uid)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PORT_HOLDER, uid, str(port), how, str(self.heard)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "listens\n"

    def close(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.mark.parametrize("how", WAYS)
def test_another_user_at_the_port_hears_no_key(tmp_path: Path, how: str) -> None:
    """`rigctl chat`, watchdog, benchmark: whoever asks with a key."""
    port = free_port()
    holder = Holder(tmp_path, how, port)
    try:
        engine = Engine(specification(port=port), KEY, lambda: [os.getpid()])
        for _ in range(5):
            with pytest.raises(BAD_ANSWERS):
                engine.models(timeout=1)
        assert holder.heard.read_bytes() == b""
    finally:
        holder.close()


@pytest.mark.parametrize("how", [way for way in WAYS if way != "never accepts"])
def test_another_user_who_takes_the_port_while_the_engine_loads_hears_no_key(tmp_path: Path, how: str) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "api-key").write_text(KEY)
    run = Run(tmp_path, {"load": [["sleep", 3]]}, api_key=True)
    run.until("STATUS=starting")
    holder = Holder(tmp_path, how, run.port)
    try:
        assert run.end(60) == 78
        assert holder.heard.read_bytes() == b""
    finally:
        holder.close()


def test_another_user_who_takes_the_port_of_an_engine_that_ended_hears_no_key(tmp_path: Path) -> None:
    """A connection that stood is gone with its engine; the next is proved anew."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    engine = Engine(specification(port=port), KEY, lambda: [process.pid])
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            engine.metrics_text()
        except BAD_ANSWERS as error:
            if "404" in str(error):
                break
            time.sleep(0.05)
    process.kill()
    process.wait()
    holder = Holder(tmp_path, "plainly", port)
    try:
        with pytest.raises(BAD_ANSWERS):
            engine.models(timeout=1)
        assert holder.heard.read_bytes() == b""
    finally:
        holder.close()


# -- on the line, and mirrors --------------------------------------------------------------------------------------


class Hears(BaseHTTPRequestHandler):
    """Writes down who asks with a token, and answers as `reply` says."""

    heard: ClassVar[list[str]] = []
    reply: tuple[int, dict[str, str], bytes] = (200, {}, b"{}")

    def do_GET(self) -> None:
        self.heard.append(str(self.headers))
        code, headers, body = self.reply
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def serve(context: ssl.SSLContext | None, **attributes: Any) -> tuple[str, type[Hears], ThreadingHTTPServer]:
    handler = type("H", (Hears,), {"heard": [], **attributes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return f"http{'s' if context else ''}://127.0.0.1:{server.server_port}", handler, server


@pytest.fixture
def token(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    yield {"file": str(tmp_path / "token")}


@pytest.mark.parametrize("source", [hub_source, http_source])
def test_one_on_the_line_with_a_certificate_of_his_own(
    bench: Bench, token: dict[str, str], source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    address, handler, server = serve(server_context())
    with pytest.raises(RigctlError):
        bench.stage(source(address), token=token, retries=0)
    assert handler.heard == []
    server.shutdown()


@pytest.mark.parametrize("kind", ["longer", "gzip bomb", "redirect to itself", "file:", "no end", "html"])
def test_a_hostile_mirror_of_a_pinned_checkpoint(bench: Bench, hub: Hub, kind: str) -> None:
    pinned = bench.pin(hub)
    biggest = max(place.stat().st_size for place in hub.root.rglob("*") if place.is_file())
    replies = {
        "longer": (200, {}, b"x" * (biggest * 3)),
        "gzip bomb": (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(256 << 20))),
        "redirect to itself": (302, {"Location": "/again"}, b""),
        "file:": (302, {"Location": "file:///etc/shadow"}, b""),
        "no end": (200, {"Content-Length": str(1 << 60)}, b"x" * 1000),
        "html": (200, {}, b"<html>"),
    }
    address, _, server = serve(None, reply=replies[kind])
    with pytest.raises(RigctlError):
        bench.stage(http_source(address), manifest=pinned, retries=1, stall=1.0)
    assert not bench.destination.exists()
    written = sum(place.stat().st_size for place in bench.root.rglob("*") if place.is_file())
    assert written < 100 << 20
    server.shutdown()


# -- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", ["yes", "cat /dev/zero", f"printf '\\n== receipt\\n{{}}'; printf '{HOSTILE[:40]!r}'"]
)
def test_a_hostile_host_in_make_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    kimi_rig(["--help"])
    print(status.lines([status.ask("kimi-1", {**DATA, "ssh_hostname": "127.0.0.1"}, tmp_path / "config")]))
    assert_harmless(capsys.readouterr().out)


@pytest.mark.parametrize("field", ["name", "state", "status", "release"])
def test_a_hostile_row_of_a_host(capsys: pytest.CaptureFixture[str], field: str) -> None:
    row = {"name": "x", "state": "active", "status": "", "digest": None, field: HOSTILE}
    said = f"\n== system\nubuntu-24.04\n\n== receipt\n{{}}\n\n== rigctl\n{json.dumps([row])}\n\n== pending\n{HOSTILE}"
    kimi_rig(["--help"])
    print(status.read_status("kimi-1", DATA, said).line())
    assert_harmless(capsys.readouterr().out)


def test_the_authority_of_the_tests_is_trusted_by_nobody_else() -> None:
    assert os.environ["SSL_CERT_FILE"] == str(authority_file())
