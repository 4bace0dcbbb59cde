"""What clients and strangers see of the edge."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.edge.conftest import ENGINE_KEY, Edge, Engine, Maker
from tests.standin import ANSWER
from tests.support.plans import gpu_plan

KEY, OTHER = "alices-key-0123456789", "bobs-key-0123456789"
CHAT = "/v1/chat/completions"
QUESTION = {"model": "kimi", "messages": [{"role": "user", "content": "What is a token?"}]}


@pytest.fixture
def pair(make: Maker) -> tuple[Edge, Engine]:
    return make({"alice": KEY, "bob": OTHER}, metrics_networks=["127.0.0.0/8"])


def test_a_key_opens_the_api_and_the_engine_gets_its_own(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    assert edge.ask(key=KEY).json()["data"][0]["id"] == "kimi"
    answer = edge.ask(CHAT, KEY, json=QUESTION)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {ENGINE_KEY}"},
        {"Authorization": KEY},
        {"X-Api-Key": KEY},
    ],
)
def test_without_a_key_of_the_edge_nothing_is_answered(pair: tuple[Edge, Engine], headers: dict[str, str]) -> None:
    edge, _ = pair
    for answer in (edge.ask(headers=headers), edge.ask(CHAT, headers=headers, json=QUESTION)):
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/invocations",
        "/tokenize",
        "/openapi.json",
        "/v1",
        "/v1/",
        "/v1/embeddings",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/models/../../invocations",
        "/v1/%6dodels",
        "/V1/models",
    ],
)
def test_other_paths_are_not_there(pair: tuple[Edge, Engine], path: str) -> None:
    """Sent as they stand: a client library would tidy some of them."""
    edge, _ = pair
    for method in ("GET", "POST"):
        assert status(edge, f"{method} {path} HTTP/1.1", f"Authorization: Bearer {KEY}", "Content-Length: 0") == 404
    assert status(edge, "DELETE /v1/models HTTP/1.1", f"Authorization: Bearer {KEY}") == 404


def status(edge: Edge, *lines: str) -> int:
    """Status of a request written by hand."""
    context = ssl.create_default_context(cafile=str(edge.certificate))
    with (
        socket.create_connection(("127.0.0.1", edge.port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall("\r\n".join((*lines, "Host: localhost", "Connection: close", "", "")).encode())
        return int(line.recv(4096).split()[1])


def test_only_recent_tls_is_spoken(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    for version in ("1", "1_1", "1_2", "1_3"):
        ask = ["openssl", "s_client", "-brief", "-connect", f"127.0.0.1:{edge.port}", f"-tls{version}"]
        done = subprocess.run(
            [*ask, "-cipher", "ALL@SECLEVEL=0"], input="", capture_output=True, text=True, check=False
        )
        spoken = "CONNECTION ESTABLISHED" in done.stderr
        assert spoken == (version in ("1_2", "1_3")), f"{version}: {done.stderr}"


def test_a_key_is_revoked_without_a_dropped_stream(pair: tuple[Edge, Engine]) -> None:
    """Of two keys one goes, and a certificate is renewed, while a stream of the other runs."""
    edge, engine = pair
    engine.faults(pause=0.1)
    words: list[str] = []
    with edge.ask(CHAT, KEY, json={**QUESTION, "stream": True}, stream=True) as stream:
        lines = stream.iter_lines()
        words.append(next(lines).decode())
        edge.write({"alice": KEY})
        edge.reload()
        assert edge.ask(key=OTHER).status_code == 401, "revoked"
        assert edge.ask(key=KEY).status_code == 200, "by the new certificate: the old one is no longer trusted"
        words += [line.decode() for line in lines if line]
    assert words[-1] == "data: [DONE]"
    text = [json.loads(word[6:])["choices"][0]["delta"].get("content", "") for word in words[:-1]]
    assert "".join(text).strip() == ANSWER


def test_a_stream_is_passed_on_word_by_word(pair: tuple[Edge, Engine]) -> None:
    edge, engine = pair
    engine.faults(pause=0.1)
    times = []
    with edge.ask(CHAT, KEY, json={**QUESTION, "stream": True}, stream=True) as stream:
        for line in stream.iter_lines():
            if line:
                times.append(time.monotonic())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(gaps) == len(ANSWER.split()) + 1
    assert sum(gap > 0.05 for gap in gaps) >= len(gaps) - 2, gaps


def test_what_is_too_large_or_of_no_length_is_refused(make: Maker) -> None:
    edge, _ = make({"alice": KEY}, limits={"request_mib": 1})
    assert edge.ask(CHAT, KEY, json={**QUESTION, "user": "x" * 900_000}).status_code == 200
    # By the head: a client that sends on may see the connection closed before it reads the answer.
    head = f"POST {CHAT} HTTP/1.1", f"Authorization: Bearer {KEY}"
    assert status(edge, *head, "Content-Length: 1100000") == 413
    assert status(edge, *head, "Transfer-Encoding: chunked") == 411


@pytest.mark.parametrize("length", [2**63, 2**63 + 5, 2**64 - 1, 2**64, 2**64 + 1, 10**30])
def test_a_length_beyond_64_bits_is_refused(pair: tuple[Edge, Engine], length: int) -> None:
    """HAProxy 2.6 reckons modulo 2^64, and sent an engine the length as it stood: 2^64 + 1 was one byte to it."""
    edge, _ = pair
    head = f"POST {CHAT} HTTP/1.1", f"Authorization: Bearer {KEY}", f"Content-Length: {length}"
    assert status(edge, *head) in (400, 413)
    assert "engine=-" in edge.after(1)[0] or "engine=0" in edge.after(1)[0]


@pytest.mark.parametrize("length", [None, 5_000_000, 2**64 - 1])
def test_http_2_takes_no_body_round_the_limit(pair: tuple[Edge, Engine], length: int | None) -> None:
    """A GET with a body: by HTTP/2 it needs no length."""
    edge, engine = pair
    engine.end()
    head = {":method": "GET", ":scheme": "https", ":path": "/v1/models", ":authority": "localhost"}
    head |= {"authorization": f"Bearer {KEY}"} | ({} if length is None else {"content-length": str(length)})
    # Literal header fields without indexing (RFC 7541, 6.2.2).
    block = b"".join(bytes([len(word)]) + word.encode() for pair in head.items() for word in ("", *pair))

    def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
        return len(content).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content

    context = ssl.create_default_context(cafile=str(edge.certificate))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_server(("127.0.0.1", engine.port)) as listener,
        socket.create_connection(("127.0.0.1", edge.port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 4, 1, block))
        line.sendall(frame(0, 0, 1, bytes(16000)))
        [said] = edge.after(1)
        listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert " status=400 " in said or " status=413 " in said


def test_one_address_holds_only_its_share_of_the_connections(make: Maker) -> None:
    edge, _ = make({"alice": KEY}, limits={"connections_an_address": 5})

    def opened(line: socket.socket) -> bool:
        line.settimeout(1)
        try:
            return line.recv(1) != b""
        except TimeoutError:
            return True
        except ConnectionError:
            return False

    with ExitStack() as held:
        lines = [held.enter_context(socket.create_connection(("127.0.0.1", edge.port))) for _ in range(12)]
        assert sum(map(opened, lines)) == 5
        other = held.enter_context(socket.create_connection(("127.0.0.1", edge.port), source_address=("127.0.0.2", 0)))
        assert opened(other)
    assert edge.ask(key=KEY).status_code == 200, "what was closed counts no more"


def test_a_head_that_trickles_in_is_not_waited_for(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    context, begun = ssl.create_default_context(cafile=str(edge.certificate)), time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", edge.port), 30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(b"GET /v1/models HTTP/1.1\r\nX: ")
        said = b""
        while not said:
            line.settimeout(1)
            try:
                said = line.recv(4096)
            except TimeoutError:
                line.sendall(b"x")
    assert said.split()[1] == b"408" and time.monotonic() - begun < 20


def test_an_engine_sees_no_other_protocol_and_no_key_of_a_client(pair: tuple[Edge, Engine]) -> None:
    edge, engine = pair
    engine.end()
    others = {"X-Api-Key": KEY, "Cookie": f"key={KEY}", "Proxy-Authorization": f"Bearer {KEY}"}
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
    with socket.create_server(("127.0.0.1", engine.port)) as listener:
        asking = threading.Thread(
            target=edge.ask, kwargs={"key": KEY, "headers": {**others, **upgrade, "X-Mine": "kept"}}
        )
        asking.start()
        connection, _ = listener.accept()
        with connection:
            heard = connection.recv(65536).decode().lower()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        asking.join()
    assert f"authorization: bearer {ENGINE_KEY}" in heard and "x-mine: kept" in heard
    assert KEY not in heard and "h2c" not in heard and "http2-settings:" not in heard


@pytest.mark.parametrize("method", ["GET /v1/models", f"POST {CHAT}"])
def test_a_body_of_no_length_is_refused_whatever_the_method(pair: tuple[Edge, Engine], method: str) -> None:
    edge, _ = pair
    key = f"Authorization: Bearer {KEY}"
    assert status(edge, f"{method} HTTP/1.1", key, "Transfer-Encoding: chunked") == 411


def test_each_key_has_its_rate(make: Maker) -> None:
    edge, _ = make({"alice": KEY, "bob": OTHER}, limits={"requests_a_minute": 3})
    found = [edge.ask(key=KEY) for _ in range(4)]
    assert [answer.status_code for answer in found] == [200, 200, 200, 429]
    assert found[-1].headers["Retry-After"] and found[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert edge.ask(key=OTHER).status_code == 200


def test_while_no_engine_is_accepted_clients_are_told_to_come_back(pair: tuple[Edge, Engine]) -> None:
    edge, engine = pair
    engine.accepted(yes=False)
    answer = edge.ask(CHAT, KEY, json=QUESTION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["Retry-After"]) > 0
    engine.accepted()
    assert edge.ask(CHAT, KEY, json=QUESTION).status_code == 200
    engine.end()
    assert edge.ask(key=KEY).status_code == 503, "its unit has not noticed yet that it is gone"


def test_each_model_is_found_where_it_is_served(make: Maker) -> None:
    """Two engines side by side, at two ports. Also where the name of the model comes last."""
    data = {"catalogue_overlay": "side-by-side.yaml", "configurations": ["vllm-base", "sglang-base"]}
    host = {"address": "127.0.0.1", "tls": {"certificate": "c", "key": "k"}, "keys": {"alice": "~/k"}}
    edge, engine = make({"alice": KEY}, plan=gpu_plan(edge=host, **data))
    found = []
    for _ in range(3):
        for model in ("kimi", "other"):
            text = {"role": "user", "content": 'x "model": "kimi" ' * 1000}
            assert edge.ask(CHAT, KEY, json={"messages": [text], "model": model}).status_code == 200
            found.append(model)
    ports = [line.split("engine=")[1].split()[0] for line in edge.after(len(found))]
    assert {*ports[::2]} == {str(engine.port)} and len({*ports[1::2]}) == 1 and ports[0] != ports[1], ports
    engine.end()
    engine.accepted(yes=False)
    assert edge.ask(CHAT, KEY, json={"messages": [], "model": "kimi"}).status_code in (200, 400, 404), (
        "the other's word"
    )


def test_a_stranger_at_the_engines_port_gets_nothing(make: Maker) -> None:
    """The port is another user's: here `nobody` stands for the service user, and the engine is the stranger."""
    edge, engine = make({"alice": KEY}, user="nobody")
    engine.faults(answer="bytes")
    assert edge.ask(CHAT, KEY, json=QUESTION).status_code == 503


def test_requests_errors_and_times_are_counted_by_name(pair: tuple[Edge, Engine]) -> None:
    edge, engine = pair
    for _ in range(3):
        edge.ask(CHAT, KEY, json=QUESTION)
    engine.faults(status=500)
    edge.ask(CHAT, KEY, json=QUESTION)
    counted = {}
    for family in text_string_to_metric_families(edge.ask("/edge/metrics").text):
        for sample in family.samples:
            if sample.labels.get("proxy", "").startswith("edge:"):
                counted[sample.name, sample.labels["proxy"], sample.labels.get("code")] = sample.value
    assert counted["haproxy_backend_http_requests_total", "edge:alice", None] == 4
    assert counted["haproxy_backend_http_responses_total", "edge:alice", "2xx"] == 3
    assert counted["haproxy_backend_http_responses_total", "edge:alice", "5xx"] == 1
    assert ("haproxy_backend_total_time_average_seconds", "edge:alice", None) in counted
    assert counted["haproxy_backend_http_requests_total", "edge:bob", None] == 0
    assert "vllm:num_requests_running" in edge.ask("/metrics").text, "the engine's own, without a key"


def test_counters_are_not_there_for_others(make: Maker) -> None:
    edge, _ = make({"alice": KEY}, metrics_networks=["10.99.0.0/16"])
    assert edge.ask("/metrics", KEY).status_code == edge.ask("/edge/metrics", KEY).status_code == 404


def test_the_access_log_has_names_and_no_secret(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    edge.ask(f"{CHAT}?api_key={KEY}", KEY, json=QUESTION)
    edge.ask("/private/diary", OTHER)
    edge.ask(key="wrong-key")
    chat, other, wrong = edge.after(3)
    assert f"key=alice path={CHAT} " in chat, "without what stands behind ?"
    assert "path=- status=404" in other and "key=- path=/v1/models status=401" in wrong
    for secret in (KEY, OTHER, ENGINE_KEY, "wrong-key", "diary", "token"):
        assert secret not in edge.log


def test_an_entry_that_was_open_without_a_key_stays_so(make: Maker) -> None:
    edge, _ = make({}, plan=gpu_plan(catalogue_overlay="open.yaml", configurations=["vllm-base"]))
    assert edge.url.startswith("http:")
    assert edge.ask(CHAT, json=QUESTION).status_code == edge.ask(CHAT, "any", json=QUESTION).status_code == 200
    assert edge.ask("/invocations", json=QUESTION).status_code == 404


def test_an_entry_that_is_taken_over_keeps_its_key(make: Maker) -> None:
    host = {"catalogue_overlay": "network.yaml", "configurations": ["vllm-eagle3-custom"], "api_key_file": "~/k"}
    edge, engine = make({"api-key": KEY}, plan=gpu_plan(**host))
    assert engine.name == "vllm-eagle3-custom" and edge.ask(key=KEY).status_code == 200
    assert edge.ask(key="wrong").status_code == 401


@pytest.mark.parametrize("changes", [{"networks": ["10.99.0.0/16"]}, {"networks": ["10.99.0.0/16", "fd00::/8"]}])
def test_this_machine_is_never_locked_out(make: Maker, changes: dict[str, list[str]]) -> None:
    edge, _ = make({"alice": KEY}, **changes)
    assert edge.ask(key=KEY).status_code == 200


def test_many_clients_at_once(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(edge.ask(CHAT, KEY, json=QUESTION).status_code)) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 20
