"""What others say may have no end, in bytes, in time or in depth: it is not waited for, nor kept."""

from __future__ import annotations

import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko.channel
import paramiko.file
import pytest
from pyinfra.connectors import util
from pyinfra.connectors.sshuserclient import client
from testinfra.backend.base import CommandResult

from rig.catalog.yaml_source import CatalogError, load
from rig.cli import pyinfra_mends, ssh
from rigctl.checkpoints import children, headers, http, hub
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.sources import Ssh, open_source
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.errors import RigctlError
from rigctl.services import doctor
from rigctl.supervisor import engine_client
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine
from tests.host.conftest import connect
from tests.support.certificates import authority_file, server_context
from tests.unit.serving import specification

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DEEP = b"[" * 100_000
Says = Callable[[socket.socket], None]


def whole(body: bytes, *headers: bytes) -> Says:
    length = b"Content-Length: %d\r\n" % len(body)
    return lambda line: line.sendall(HEAD + b"".join(headers) + length + b"Connection: close\r\n\r\n" + body)


def endless(line: socket.socket) -> None:
    line.sendall(HEAD + b"Connection: close\r\n\r\n")
    while True:
        line.sendall(b"[[],".ljust(1 << 16))


def trickling(line: socket.socket) -> None:
    line.sendall(HEAD + b"Connection: close\r\n\r\n")
    while True:
        line.sendall(b" ")
        time.sleep(0.05)


def cut(line: socket.socket) -> None:
    line.sendall(HEAD + b"Content-Length: 99\r\n\r\n[")


def reset(line: socket.socket) -> None:
    cut(line)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def garbled(line: socket.socket) -> None:
    whole(b"no gzip", b"Content-Encoding: gzip\r\n")(line)


def silent(line: socket.socket) -> None:
    while line.recv(1 << 16):
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Starts a server that reads a request and says something; its port."""
    listeners = []

    def started(says: Says, *, tls: bool = False) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer(line: socket.socket) -> None:
            with (
                suppress(OSError),
                line,
                server_context().wrap_socket(line, server_side=True) if tls else line as spoken,
            ):
                spoken.recv(1 << 16)
                says(spoken)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    yield started
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are reached at once."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority_file()))
    monkeypatch.setattr(engine_client, "ANSWER_BYTES", 1 << 20)
    for module in (http, children):
        monkeypatch.setattr(module, "LISTING_BYTES", 1 << 20)
    monkeypatch.setattr(children, "MOST_ERRORS", 1 << 20)
    for module in (http, hub):
        monkeypatch.setattr(module, "LISTING_SECONDS", 0.3)
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(ssh, "MOST_BLOCKS", 2048)
    monkeypatch.setattr("rigctl.builder._confined", False)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("says", [endless, trickling, silent, cut, reset, garbled, whole(b'{"data": %s' % DEEP)])
def test_an_engine(serve: Callable[..., int], says: Says) -> None:
    """Root asks it, by `rigctl switch`, `canary`, `status`."""
    engine, begun = Engine(specification(port=serve(says))), time.monotonic()
    for ask in (engine.models, engine.metrics_text, lambda timeout: engine.completion("x", timeout=timeout)):
        with suppress(*BAD_ANSWERS):
            ask(timeout=0.2)
            assert ask == engine.metrics_text and says not in (endless, trickling, silent, cut, reset, garbled)
    assert time.monotonic() - begun < 30


@pytest.mark.usefixtures("small")
def test_an_engine_sends_root_nowhere_else(serve: Callable[..., int]) -> None:
    asked = []

    def elsewhere(line: socket.socket) -> None:
        asked.append(line)

    there = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n" % serve(elsewhere)
    engine = Engine(specification(port=serve(lambda line: line.sendall(there))))
    with pytest.raises(BAD_ANSWERS):
        engine.models()
    assert not asked


def order(**source: Any) -> CheckpointJob:
    content = {"format": 1, "name": "m", "destination": "/nonexistent/m", "source": source, "retries": 0}
    return CheckpointJob.parse(content, "test")


def listing(job: CheckpointJob) -> None:
    open_source(job, Progress("m"), threading.Event()).listing()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["hub", "http"])
@pytest.mark.parametrize(
    "says", [endless, trickling, silent, *map(whole, (DEEP, b'{"a": 1}', b"[1]", b'[{"type": "file"}]', b"null"))]
)
def test_the_list_of_a_repository(serve: Callable[..., int], kind: str, says: Says) -> None:
    address, begun = f"https://127.0.0.1:{serve(says, tls=True)}", time.monotonic()
    source = {"repository": "a/b", "revision": "c" * 40, "endpoint": address} if kind == "hub" else {"url": address}
    job = order(kind=kind, **source).model_copy(update={"stall": 0.3})
    with pytest.raises(RigctlError):
        listing(job)
    assert time.monotonic() - begun < 30


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("page", [b"[]", b'[{"type": "file", "path": "x", "size": 1, "oid": "%s"}]' % (b"a" * 40)])
def test_a_list_of_pages_without_end(serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch, page: bytes) -> None:
    ports: list[int] = []

    def again(line: socket.socket) -> None:
        whole(page, b'Link: <https://127.0.0.1:%d/x>; rel="next"\r\n' % ports[0])(line)

    ports.append(serve(again, tls=True))
    if page != b"[]":
        monkeypatch.setattr(hub, "LISTING_SECONDS", 60)
        monkeypatch.setattr(hub, "MOST_FILES", 3)
    with pytest.raises(RigctlError, match=r"no end|more than 3 files"):
        listing(order(kind="hub", repository="a/b", revision="c" * 40, endpoint=f"https://127.0.0.1:{ports[0]}"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "says",
    [
        "yes",
        "cat /dev/zero",
        "yes >&2",
        r"printf 'x ./a\0'",
        r"case $* in *find*) printf '1 a\0';; *) printf '%064d  ./../etc/passwd\0' 1;; esac",
        r"case $* in *find*) printf '1 ../a\0';; *) printf '%064d  ./../a\0' 1;; esac",
        r"case $* in *find*) printf '%05000d a\0' 1;; esac",
    ],
)
def test_a_host_that_lists_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    source = open_source(
        order(kind="rsync", host="other", user="u", path="/models/m"), Progress("m"), threading.Event()
    )
    assert isinstance(source, Ssh)
    begun = time.monotonic()
    with pytest.raises(RigctlError):
        source.listing()
    assert time.monotonic() - begun < 30


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("says", ["yes", "yes >&2", "cat /dev/zero"])
def test_a_host_that_is_verified(tmp_path: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    result: CommandResult | None = None
    with suppress(RuntimeError):  # testinfra's, for the exit code 255
        result = connect("gpu", {}, tmp_path / "config").run("true")
    assert result is None or (result.rc != 0 and len(result.stdout) + len(result.stderr) < 4 << 20)


def test_a_command_that_pyinfra_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One endless line, by the class that `mend` puts in place of paramiko's own."""
    closed = []

    class Endless:
        def recv(self, size: int) -> bytes:
            return bytes(size)

        recv_stderr = recv

        def _set_closed(self) -> None: ...

        def close(self) -> None:
            closed.append(1)

    monkeypatch.setattr(pyinfra_mends.Ending, "left", 1 << 20)
    for kind in (paramiko.channel.ChannelFile, paramiko.channel.ChannelStderrFile):
        stream = type("Mended", (pyinfra_mends.Ending, kind), {})(Endless(), "rb", 8192)
        assert len(stream.readline()) <= 1 << 20
        assert stream.readline() == b""
    assert len(closed) >= 2 and "no end" in capsys.readouterr().err


def test_pyinfra_reads_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (paramiko.channel, "ChannelFile"), (paramiko.channel, "ChannelStderrFile")
    mended = (sys, "stdout"), (sys, "stderr"), (util, "read_buffer"), (paramiko.file, "u")
    for place, name in (*kinds, *mended, (client, "ProxyCommand"), (client.SSHClient, "parse_config")):
        monkeypatch.setattr(place, name, getattr(place, name))  # as it was, afterwards
    pyinfra_mends.mend()
    assert all(issubclass(getattr(*kind), pyinfra_mends.Ending) for kind in kinds)


HARD = ["-" * 60_000, "--key" * 12_000, "token:" + " " * 60_000, "bearer" + " " * 60_000, "://" + "a:" * 30_000]
"""Lines of an engine's log that cost a pattern the square of their length, if it looks for them badly."""


@pytest.mark.parametrize("text", HARD, ids=[re.sub(r"\s+", " ", text)[:8] for text in HARD])
def test_a_log_that_doctor_masks(text: str) -> None:
    begun = time.process_time()
    doctor.masked(text, [])
    assert time.process_time() - begun < 30


def test_a_secret_is_masked_though_another_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    (tmp_path / "c").write_text("s3cret-key\n")
    assert doctor.masked("x s3cret-key y --api-key=abc", doctor.known_secrets(tmp_path)) == "x *** y --api-key=***"


def test_a_catalogue_of_aliases(tmp_path: Path) -> None:
    """Five lines of nine aliases each are 59,049 values, ten of them more than any memory."""
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 11))]
    (tmp_path / "x.yaml").write_text("\n".join(lines))
    with pytest.raises(CatalogError, match="more than 20,000 values"):
        load(tmp_path / "x.yaml")


@pytest.mark.parametrize("header", ["twin", "shape"])
def test_a_header_that_costs_the_square_of_its_length(tmp_path: Path, header: str) -> None:
    """A file of weights may have 100 MB of header."""
    tensor = '{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
    names = [f'"n{number}": {tensor}' for number in range(40_000)]
    shape = tensor.replace("[0]", f"[{'99999999999999999,' * 100_000}1]")
    text = f"{{{', '.join([*names, names[-1]])}}}" if header == "twin" else f'{{"x": {shape}}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    begun = time.process_time()
    with pytest.raises(headers.BadFile, match=r"twice|100001 dimensions"):
        headers.read(tmp_path / "model.safetensors")
    assert time.process_time() - begun < 3
