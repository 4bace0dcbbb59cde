"""Talking to an engine: chat completions and the counters of speculation."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import requests.adapters
import urllib3.connection
import urllib3.exceptions
from prometheus_client.parser import text_string_to_metric_families

from rigctl.contract import layout
from rigctl.errors import RigctlError
from rigctl.supervisor.activity import engine_processes
from rigctl.supervisor.listening import Members, StrangerAnswers, accepted_by
from rigctl.supervisor.specification import Specification

CREDENTIAL = Path(layout.API_KEY)
GIVEN = Path("/run/credentials")
"""Where systemd keeps the credentials of units that run, readable by root: a directory each."""
BAD_ANSWERS = (
    requests.RequestException,
    StrangerAnswers,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What calls of `Engine` and the reading of an answer raise: nothing came, or what came may be anything."""
ANSWER_BYTES = 64 << 20
"""More than any answer of an engine: its counters are a few hundred KiB."""
ACCEPT_SECONDS = 60.0
"""So long a connection may wait to be accepted; an engine on a busy processor has been seen to take seconds."""


def api_key(unit: str) -> str | None:
    """The API key of the engine that the unit runs, as systemd has given it to the unit; None where it has none.

    Inside a unit it is that unit's own. Raises RigctlError for what no HTTP header can carry.
    """
    path = Path(os.environ.get("CREDENTIALS_DIRECTORY") or GIVEN / unit, "api-key")
    try:
        key = path.read_bytes().strip()
    except OSError:
        return None
    if not re.fullmatch(rb"[\x21-\x7e]*", key):
        raise RigctlError(f"the API key in {path} is not one line of plain characters: deploy again")
    return key.decode() or None


@dataclass(frozen=True)
class Speculation:
    """Counters since the engine started. drafts: steps with a draft; drafted, accepted: tokens, bonus not counted."""

    drafts: int
    drafted: int
    accepted: int

    def since(self, before: Speculation) -> Speculation:
        """What happened between two readings."""
        return Speculation(self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted)

    def plus(self, more: Speculation) -> Speculation:
        """Both together."""
        return Speculation(self.drafts + more.drafts, self.drafted + more.drafted, self.accepted + more.accepted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a step yields: 1 + accepted drafts a step. None before the first step."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else None


class _OursAlone(requests.adapters.HTTPAdapter):
    """Connections over which nothing is sent before a process of the unit is known to have accepted them."""

    def __init__(self, processes: Members) -> None:
        super().__init__()

        class Proved(urllib3.connection.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                seconds = self.timeout if isinstance(self.timeout, int | float) else ACCEPT_SECONDS
                try:
                    if isinstance(self.sock, socket.socket):
                        accepted_by(self.sock, processes, min(seconds, ACCEPT_SECONDS))
                except TimeoutError as error:
                    self.close()
                    raise urllib3.exceptions.ConnectTimeoutError(self, str(error)) from None
                except StrangerAnswers:
                    self.close()
                    raise

        class Pool(urllib3.HTTPConnectionPool):
            ConnectionCls = Proved

        self.poolmanager.pool_classes_by_scheme = {"http": Pool}


class Engine:
    """One engine's HTTP interface. Every call may raise one of BAD_ANSWERS.

    With a key it talks to nobody but `processes`, those of the unit; the engine that this process supervises, unless
    given.
    """

    def __init__(
        self, specification: Specification, key: str | None = None, processes: Members = engine_processes
    ) -> None:
        self.specification = specification
        self.listening = False  # whether `ready` has seen it answer at all
        self.key, self._processes = key, processes
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy stands between rigctl and this machine
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"
            self._session.mount("http://", _OursAlone(processes))

    def anew(self) -> Engine:
        """The same engine over a connection of its own: sessions are not made for threads."""
        return Engine(self.specification, self.key, self._processes)

    def prove(self, seconds: float = 5) -> int:
        """The process that accepts a connection to the engine now, for a client that connects by itself.

        Raises requests.ConnectionError; StrangerAnswers.
        """
        endpoint = self.specification.endpoint
        try:
            with socket.create_connection((endpoint.reached_at, endpoint.port), seconds) as connection:
                return accepted_by(connection, self._processes, seconds)
        except OSError as error:
            raise requests.ConnectionError(f"{endpoint.address}: {error}") from None

    def models(self, timeout: float = 5) -> list[str]:
        """Names of the served models."""
        return [entry["id"] for entry in self._get("/v1/models", timeout).json()["data"]]

    def context(self, timeout: float = 5) -> int:
        """Tokens of prompt and answer together that it takes, as both engines tell it beside the model's name."""
        return int(self._get("/v1/models", timeout).json()["data"][0]["max_model_len"])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 128,
        temperature: float | None = 0,
        timeout: float = 300,
        **more: Any,
    ) -> dict[str, Any]:
        """One chat completion; the first choice of the answer, with its message."""
        parameters = more if temperature is None else {**more, "temperature": temperature}
        choice: dict[str, Any] = self._complete(messages, timeout, max_tokens=max_tokens, **parameters)["choices"][0]
        return choice

    def ready(self, timeout: float = 5) -> bool:
        """Whether the engine says of itself that it is up: it has a model list and /health is not 503.

        SGLang opens its port before its warm-up is over and answers 503 until then (http_server.py, /health).
        """
        try:
            self.models(timeout)
            self.listening = True
            return self._get("/health", max(timeout, 25)).ok
        except StrangerAnswers:
            raise  # the engine cannot have its port any more
        except BAD_ANSWERS:
            return False

    def metrics(self, timeout: float = 5) -> Metrics:
        """The engine's counters and gauges now."""
        text = self.metrics_text(timeout)
        speculation = self.specification.speculation
        return read_metrics(self.specification.engine, text, speculation.draft_tokens if speculation else None)

    def metrics_text(self, timeout: float = 5) -> str:
        """/metrics as it stands."""
        return self._get("/metrics", timeout).text

    def routes(self, timeout: float = 10) -> dict[str, str]:
        """Path -> methods of the routes that /openapi.json lists, {parameters} filled in; empty without one."""
        try:
            paths = self._get("/openapi.json", timeout).json()["paths"]
            methods = {path: ", ".join(sorted(name.upper() for name in found)) for path, found in paths.items()}
        except BAD_ANSWERS:
            return {}
        return {re.sub(r"\{[^}]*\}", "x", path): names for path, names in methods.items()}

    def status_of(self, method: str, path: str, timeout: float = 5) -> int:
        """HTTP status of a request with an empty JSON body; connection errors raise requests.RequestException."""
        body: dict[str, str] | None = {} if method == "POST" else None
        url = self.specification.base_url + path
        response = self._session.request(method, url, json=body, timeout=timeout, allow_redirects=False, stream=True)
        response.close()
        return response.status_code

    def completion(self, prompt: str, *, timeout: float = 300, **parameters: Any) -> dict[str, Any]:
        """The whole answer to one user message, with its usage."""
        return self._complete([{"role": "user", "content": prompt}], timeout, **parameters)

    def _complete(self, messages: Sequence[Mapping[str, Any]], timeout: float, **parameters: Any) -> dict[str, Any]:
        body = {"model": self.specification.model, "messages": list(messages), **parameters}
        answer: dict[str, Any] = self.post("v1/chat/completions", body, timeout=timeout).json()
        return answer

    def post(self, path: str, content: Mapping[str, Any] | None = None, *, timeout: float) -> requests.Response:
        """POST, such as start_profile, without a body or with JSON."""
        return self._asked("POST", f"/{path}", timeout, content)

    def _get(self, path: str, timeout: float) -> requests.Response:
        return self._asked("GET", path, timeout)

    def _asked(
        self, method: str, path: str, timeout: float, content: Mapping[str, Any] | None = None
    ) -> requests.Response:
        """The whole answer: root asks too, and an engine may have fallen into wrong hands. No redirect is followed."""
        url = self.specification.base_url + path
        with self._session.request(
            method, url, json=content, timeout=timeout, allow_redirects=False, stream=True
        ) as response:
            end, body = time.monotonic() + timeout, bytearray()
            try:
                # read1 gives what has arrived: others wait until a block is full.
                while block := response.raw.read1(1 << 16, decode_content=True):
                    body += block
                    if len(body) > ANSWER_BYTES or time.monotonic() > end:
                        raise requests.RequestException(f"{url}: the answer has no end")
            except urllib3.exceptions.HTTPError as error:  # as requests does where it reads itself
                raise requests.ConnectionError(error) from error
        response.raise_for_status()
        response.raw = io.BytesIO(body)
        return response


def engine_of(specification: Specification) -> Engine:
    """The engine of a unit, asked from outside: the unit's processes, as systemd knows them, get the key, nobody else.

    Raises RigctlError for a key that cannot be used.
    """

    def processes() -> list[int]:
        command = ["systemctl", "show", "--value", "--property=MainPID", specification.unit]
        main = subprocess.run(command, capture_output=True, errors="replace", check=False).stdout.strip()
        return engine_processes(int(main)) if main.isdigit() and int(main) else []

    return Engine(specification, api_key(specification.unit), processes)


@dataclass(frozen=True)
class Metrics:
    """What an engine's /metrics says, in one vocabulary.

    running, waiting: requests. pulse: numbers that change while any request makes progress; SGLang counts tokens only
    when a request ends, its gauges move before that.
    speculation: None where the engine exports no counters (no drafter, or gauges only).
    own_rate, own_length: the engine's own gauges, comparable only with their definition (watchdog.RATE_IS).
    """

    running: int = 0
    waiting: int = 0
    pulse: tuple[float, ...] = ()
    speculation: Speculation | None = None
    own_rate: float | None = None
    own_length: float | None = None


_NAMES = {
    "vllm": {
        "running": ["vllm:num_requests_running"],
        "waiting": ["vllm:num_requests_waiting"],
        "pulse": ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc"],
        "drafts": ["vllm:spec_decode_num_drafts_total"],
        "drafted": ["vllm:spec_decode_num_draft_tokens_total"],
        "accepted": ["vllm:spec_decode_num_accepted_tokens_total"],
    },
    "sglang": {
        "running": ["sglang:num_running_reqs"],
        "waiting": ["sglang:num_queue_reqs"],
        "pulse": [
            "sglang:prompt_tokens_total",
            "sglang:generation_tokens_total",
            "sglang:gen_throughput",
            "sglang:num_used_tokens",
        ],
        "drafts": ["sglang:spec_verify_calls_total"],
        "generated": ["sglang:generation_tokens_total"],
        "requests": ["sglang:num_requests_total"],
        "own_rate": ["sglang:spec_accept_rate"],
        "own_length": ["sglang:spec_accept_length"],
    },
}


def read_metrics(engine: str, text: str, draft_tokens: int | None) -> Metrics:
    """Read the Prometheus text of one engine. draft_tokens: the configuration's; None without speculation."""
    names = _NAMES[engine]
    wanted = tuple({name for listed in names.values() for name in listed})
    kept = "\n".join(line for line in text.splitlines() if line.startswith(wanted))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(kept + "\n"):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    value = {key: sum(found[name] for name in listed if name in found) for key, listed in names.items()}
    present = {key for key, listed in names.items() if any(name in found for name in listed)}
    counted = None
    if engine == "vllm" and present >= {"drafts", "drafted", "accepted"}:
        counted = Speculation(int(value["drafts"]), int(value["drafted"]), int(value["accepted"]))
    elif engine == "sglang" and "drafts" in present:
        # A request's first token comes from its prefill, and each verification yields one token beside the accepted
        # ones (SGLang 0.5.23, metrics_collector.py, batch_result_processor.py). Requests count when they end.
        steps = int(value["drafts"])
        accepted = max(0, int(value["generated"] - value["requests"]) - steps)
        counted = Speculation(steps, steps * ((draft_tokens or 4) - 1), accepted)
    # SGLang 0.5.16 exports its gauges of speculation as 0 when there is none.
    own = present & {"own_rate", "own_length"} if draft_tokens else set()
    return Metrics(
        running=int(value["running"]),
        waiting=int(value["waiting"]),
        pulse=tuple(found.get(name, 0) for name in names["pulse"]),
        speculation=counted,
        own_rate=value["own_rate"] if "own_rate" in own else None,
        own_length=value["own_length"] if "own_length" in own else None,
    )
