"""What an engine must prove, and what must hold before it is started."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from rigctl.errors import RigctlError
from rigctl.supervisor import prechecks
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.readiness import NotAccepted, accept
from rigctl.supervisor.watchdog import Watch
from tests.standin import Handler, State
from tests.unit.serving import checkpoint, drafter, limits, proved, specification


class Standin:
    """A stand-in engine on a thread."""

    def __init__(self, directory: Path) -> None:
        self.faults_file = directory / "faults.json"
        self.state = State(argparse.Namespace(model="stand-in", faults=self.faults_file), None)
        handler = type("OwnHandler", (Handler,), {"state": self.state})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def faults(self, **what: Any) -> None:
        self.faults_file.write_text(json.dumps(what))

    def engine(self, key: str | None = None, **more: Any) -> Engine:
        return Engine(specification(port=self.server.server_address[1], **more), key, lambda: [os.getpid()])


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Standin]:
    found = Standin(tmp_path)
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("degenerate", "one character repeated"),
        ("empty", "the answer is empty"),
        ("bytes", "no UTF-8"),
        ("think", "reasoning is not separated"),
        ("no-call", "tool_call: no call came"),
    ],
)
def test_bad_answers_are_refused(standin: Standin, answer: str, why: str) -> None:
    standin.faults(answer=answer)
    with pytest.raises(NotAccepted, match=why) as refused:
        accept(standin.engine())
    # A degenerate model drafts itself perfectly: both verdicts are shown.
    assert "36/36 accepted)" in str(refused.value)


def test_another_model_is_refused(standin: Standin) -> None:
    with pytest.raises(NotAccepted, match="identity: serves stand-in, not kimi"):
        accept(standin.engine(model="kimi"))


def test_a_drafter_that_is_not_used_is_refused(standin: Standin) -> None:
    with pytest.raises(NotAccepted, match="speculation"):
        accept(standin.engine(engine="sglang"))


NGRAM = {"method": "ngram", "drafter": None, "steps": 3, "draft_tokens": 4, "break_even_length": None}


def test_ngram_is_proved_on_a_text_that_repeats(standin: Standin) -> None:
    standin.faults(answer="copy", ngram=True)
    engine = standin.engine(speculation=NGRAM)
    assert accept(engine)["speculation"]["drafts"] == 6
    # A model that will not repeat a text gives n-gram nothing to draft.
    standin.faults(ngram=True)
    assert "nothing to draft" in accept(engine)["speculation"]["found"]
    standin.faults(answer="copy in vain", ngram=True)
    with pytest.raises(NotAccepted, match="speculation: the counters did not move"):
        accept(engine)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "mtp"])
def test_other_methods_draft_with_any_answer(standin: Standin, method: str) -> None:
    engine = standin.engine(speculation={**NGRAM, "method": method, "drafter": None if method == "mtp" else "d"})
    assert accept(engine)["speculation"]["accepted"] == 36
    standin.faults(ngram=True)
    with pytest.raises(NotAccepted, match="speculation: the counters did not move"):
        accept(engine)


def test_routes_without_the_key(standin: Standin) -> None:
    with pytest.raises(NotAccepted, match="GET /v1/models answers 200 without the API key"):
        accept(standin.engine("key", api_key=True))
    standin.state.key = "key"
    proved = accept(standin.engine("key", api_key=True))
    assert proved["routes"]["open_without_key"] == [
        "POST /invocations (generates)",
        "GET /health (tells its state)",
        "GET /metrics (tells its counters)",
        "GET /openapi.json (tells its interface)",
        "POST /sleep (listed by the engine)",
    ]
    with pytest.raises(NotAccepted, match="identity: no answer: HTTP 401"):
        accept(standin.engine("wrong key", speculation=None))


SPOILS: dict[str, Callable[[Path], object]] = {
    "the drafter is missing": shutil.rmtree,
    "is damaged: model.safetensors": lambda at: (at / "model.safetensors").write_bytes(b"\x08" + bytes(9)),
    "truncated or not safetensors": lambda at: (at / "model.safetensors").write_bytes(b"\xff" * 8 + bytes(9)),
    "half downloaded": lambda at: (at / "x.incomplete").touch(),
    "is not as it was proved": lambda at: (at / "config.json").write_text("{"),
    "no weights": lambda at: (at / "model.safetensors").unlink(),
    "header cannot be read": lambda at: (at / "model.safetensors").write_bytes(b"\x03" + bytes(7) + b"[1]"),
}


@pytest.mark.parametrize("why", SPOILS)
def test_a_bad_drafter_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    target, bad = checkpoint(tmp_path / "target"), drafter(tmp_path / "drafter")
    monkeypatch.setenv("RIGCTL_CHECKPOINTS", str(proved(tmp_path / "state", target=target, drafter=bad)))
    spec = specification(target_path=str(target), drafter_path=str(bad))
    assert dict(prechecks.run_all(spec))["drafter"] == "1 weight files are whole by their headers"
    SPOILS[why](bad)
    with pytest.raises(RigctlError, match=why):
        dict(prechecks.run_all(spec))


def test_a_taken_port_and_missing_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(RigctlError, match="rigctl free"):
        prechecks.port_free(specification(port=stranger.getsockname()[1]))
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    full = specification()
    object.__setattr__(full.limits, "minimum_disk_mib", 1 << 40)
    with pytest.raises(RigctlError, match="make room"):
        prechecks.disk(full)


@pytest.mark.parametrize(
    ("memory", "outcome"),
    [([3, 5], "2 are free"), ([3, 90000], "GPU 1 90000 MiB, by 4711"), ([3], "GPU 1: nvidia-smi")],
)
def test_gpus_are_really_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: list[int], outcome: str) -> None:
    rows = "".join(f"echo {index}, {used}; " for index, used in enumerate(memory))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) {rows};; *) echo 4711;; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    spec = specification(gpus=[0, 1])
    object.__setattr__(spec.limits, "gpu_wait_seconds", 0)
    try:
        found = prechecks.gpus_free(spec)
    except RigctlError as error:
        found = str(error)
    assert outcome in found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "data",
                    "id",
                    "choices",
                    "message",
                    "content",
                    "reasoning",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
METRICS = st.lists(
    st.sampled_from(
        ["vllm:spec_decode_num_drafts_total", "vllm:num_requests_running", "#", "{", "}", '"', "=", " ", "\n"]
    )
    | st.sampled_from(["1", "NaN", "+Inf", "-1", "x"]),
    max_size=12,
).map("".join)


class Anything(Engine):
    """An engine that answers anything."""

    def __init__(self, answers: st.DataObject) -> None:
        super().__init__(specification(limits=limits(settle_seconds=0.01)))
        self.draw = answers.draw

    def _get(self, path: str, timeout: float) -> requests.Response:
        text = self.draw(METRICS) if path == "/metrics" else json.dumps(self.draw(JSON))
        return self._response(text)

    def post(self, path: str, content: object = None, *, timeout: float) -> requests.Response:
        choices = st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"message": JSON}), min_size=1)})
        return self._response(json.dumps(self.draw(JSON | choices)))

    @staticmethod
    def _response(text: str) -> requests.Response:
        response = requests.Response()
        response.status_code, response._content = 200, text.encode()
        return response


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_answers_of_any_shape_are_refused_with_words(data: st.DataObject) -> None:
    engine = Anything(data)
    engine.ready()
    with pytest.raises(NotAccepted, match=r"identity: |speculation: "):
        accept(engine)
    watch = Watch(engine)
    watch.round()
    assert all("\n" not in line for line in watch.text().splitlines()[:1])
