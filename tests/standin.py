"""A stand-in for an engine: the same HTTP protocol, log lines and signals, a start within a second, faults on demand.

Standard library only, since it also runs as a unit in the box. `--plan JSON` says how it loads:

    load: list of ["log", text], ["shout", bytes], ["sleep", seconds], ["busy", seconds], ["exit", code], ["stop"]
        (SIGSTOP to itself)
    worker, orphan: start a child process; the orphan leaves the process group and ignores SIGTERM
    deaf: ignore SIGTERM; "while loading": only until it listens
    segment_mib: keep a shared memory segment of this size

`--faults FILE` is read anew for each request: {"answer": "degenerate" | "empty" | "bytes" | "think" | "no-call" |
"copy" | "copy in vain"} (a text that is to be repeated), {"ngram": true} (it drafts with the answer "copy" alone),
{"status": 500}, {"slow": seconds}, {"moving": true} (counters move all the same), {"accept": share of drafts},
{"grow": MiB with each request}, {"pause": seconds between the words of a stream}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

THOUGHT = "The user asks about tokens, so a short plain answer is best."
ANSWER = "A token is a piece of text that the model reads and writes as one unit."
DRAFT_TOKENS = 3


class State:
    """What one stand-in knows of itself."""

    def __init__(self, arguments: argparse.Namespace, key: str | None) -> None:
        self.model: str = arguments.model
        self.sglang: bool = getattr(arguments, "sglang", False)
        self.key = key
        self.faults_file: Path | None = arguments.faults
        self.worker: subprocess.Popen[bytes] | None = None
        self.running = 0
        self.tokens = 0
        self.drafts = self.accepted = 0
        self.closing = False
        self.ballast: list[bytes] = []
        self.lock = threading.Lock()

    @property
    def faults(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.faults_file.read_text()) if self.faults_file else {}
        except (OSError, ValueError):
            return {}
        return found


class Handler(BaseHTTPRequestHandler):
    """The routes that rigctl asks."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as asyncio does
    state: State

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: a real access log is the engine's own business."""

    def reply(self, status: int, content: Any, kind: str = "application/json") -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def refused(self) -> bool:
        """vLLM's rule: the key guards /v1 alone."""
        state = self.state
        if state.closing and self.command == "POST":
            self.reply(503, {"error": "shutting down"})
            return True
        if state.key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {state.key}":
            self.reply(401, {"error": "Unauthorized"})
            return True
        return False

    def do_GET(self) -> None:
        if self.refused():
            return
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": self.state.model}]})
        elif self.path == "/health":
            self.reply(200, "")
        elif self.path == "/openapi.json":
            self.reply(
                200, {"paths": {"/v1/models": {"get": {}}, "/v1/files/{id}": {"get": {}}, "/sleep": {"post": {}}}}
            )
        elif self.path == "/metrics":
            self.reply(200, metrics(self.state), "text/plain")
        else:
            self.reply(404, {})

    def do_PROPFIND(self) -> None:
        """A method that no route has."""
        if not self.refused():
            self.reply(405, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.refused():
            return
        if self.path == "/invocations":
            self.reply(400, {"error": "messages: field required"})
        elif self.path != "/v1/chat/completions":
            self.reply(404, {})
        elif "messages" not in body:
            self.reply(400, {"error": "messages: field required"})
        else:
            self.chat(body)

    def chat(self, body: dict[str, Any]) -> None:
        state = self.state
        faults = state.faults
        with state.lock:
            state.running += 1
        try:
            state.ballast.append(b"x" * (int(faults.get("grow", 0)) << 20))
            for _ in range(int(faults.get("slow", 0) * 10)):
                time.sleep(0.1)
                state.tokens += bool(faults.get("moving"))
            if faults.get("status") or (state.worker and state.worker.poll() is not None):
                self.reply(faults.get("status") or 500, {"error": "EngineDeadError"})
                return
            count = min(int(body.get("max_tokens", 16)), 24)
            asked = (body.get("messages") or [{"content": ""}])[-1]["content"].rpartition("\n\n")[2]
            drafting = not faults.get("ngram") or (faults.get("answer") == "copy" and "salt" in asked)
            with state.lock:
                state.tokens += count
                state.drafts += count // (1 + DRAFT_TOKENS) * drafting
                state.accepted += int(count // (1 + DRAFT_TOKENS) * DRAFT_TOKENS * faults.get("accept", drafting))
            choice = answer(faults.get("answer"), bool(body.get("tools")), asked)
            if body.get("stream"):
                self.stream(choice, float(faults.get("pause", 0)))
            else:
                self.reply(200, {"choices": [choice], "usage": {"completion_tokens": count}})
        finally:
            with state.lock:
                state.running -= 1

    def stream(self, choice: dict[str, Any], pause: float) -> None:
        """The answer as server-sent events, a word each."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"content": f"{word} "} for word in (message["content"] or "").split()]
        deltas += [{"tool_calls": [{"index": 0, **call}]} for call in message.get("tool_calls", [])]
        chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        events = [json.dumps({"choices": [one]}) for one in (*chunks, {**choice, "delta": {}})]
        with contextlib.suppress(OSError):
            for event in (*events, "[DONE]"):
                line = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
                time.sleep(pause)
            self.wfile.write(b"0\r\n\r\n")


def answer(fault: str | None, tools: bool, asked: str) -> dict[str, Any]:
    """One choice of a chat completion. asked: the last paragraph of the question."""
    message: dict[str, Any] = {"role": "assistant", "reasoning": THOUGHT, "content": ANSWER}
    if fault == "degenerate":
        message |= {"reasoning": "", "content": "!" * 64}
    elif fault == "empty":
        message |= {"reasoning": "", "content": ""}
    elif fault == "bytes":
        message |= {"content": "A token is \ufffd\ufffd"}
    elif fault == "think":
        message |= {"reasoning": None, "content": f"<think>{THOUGHT}</think>{ANSWER}"}
    elif fault in ("copy", "copy in vain") and len(asked) > 100:
        message |= {"content": asked}
    elif tools and fault != "no-call":
        call = {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})}
        message |= {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    return {"index": 0, "message": message, "finish_reason": "stop"}


def metrics(state: State) -> str:
    """vLLM's names, or SGLang's for the same where it was started as SGLang is."""
    values = {
        "num_requests_running": state.running,
        "num_requests_waiting": 0,
        "generation_tokens_total": state.tokens,
        "spec_decode_num_drafts_total": state.drafts,
        "spec_decode_num_draft_tokens_total": state.drafts * DRAFT_TOKENS,
        "spec_decode_num_accepted_tokens_total": state.accepted,
    }
    if state.sglang:
        # A verification yields the accepted tokens and one; a request's first token comes from its prefill.
        values = {
            "num_running_reqs": state.running,
            "num_queue_reqs": 0,
            "spec_verify_calls_total": state.drafts,
            "generation_tokens_total": state.accepted + state.drafts,
            "num_requests_total": 0,
        }
    engine = "sglang" if state.sglang else "vllm"
    return "".join(f'{engine}:{name}{{engine="0"}} {value}\n' for name, value in values.items())


def load(steps: list[list[Any]]) -> None:
    """Act out the load."""
    for step, *rest in steps:
        if step == "log":
            print(rest[0], flush=True)
        elif step == "shout":
            print("x" * rest[0], flush=True)
        elif step == "sleep":
            time.sleep(rest[0])
        elif step == "busy":
            end = time.monotonic() + rest[0]
            while time.monotonic() < end:
                pass
        elif step == "exit":
            sys.exit(rest[0])
        elif step == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def child(name: str, *, orphan: bool) -> subprocess.Popen[bytes]:
    """A process that does nothing, named as engines name theirs."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if orphan else ""
    code = f"{ignore}import time; time.sleep(86400)  # {name}"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=orphan)


def segment(mebibytes: int) -> None:
    """Leave a shared memory segment as an engine that is killed does."""
    with Path(f"/dev/shm/sgl_shm_mm_{os.getpid()}").open("wb") as file:
        for _ in range(mebibytes):
            file.write(bytes(1 << 20))


def api_key(arguments: argparse.Namespace) -> str | None:
    """From the environment as vLLM takes it, or from a file of arguments as SGLang does."""
    if arguments.config:
        return str(arguments.config.read_text().partition(": ")[2].strip().strip("'"))
    return os.environ.get("VLLM_API_KEY")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", "--model-path", default="stand-in")
    parser.add_argument("--served-model-name")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--faults", type=Path)
    parser.add_argument("--plan", type=json.loads, default={})
    parser.add_argument("--shutdown-timeout", type=float, default=0)
    arguments, _ = parser.parse_known_args()
    arguments.sglang = "--model-path" in sys.argv
    arguments.model = arguments.served_model_name or arguments.model
    print("ARGV " + json.dumps(sys.argv), flush=True)
    print("KIMI " + json.dumps({k: v for k, v in os.environ.items() if k.startswith("DRILL_")}), flush=True)
    key = api_key(arguments)
    if key and arguments.plan.get("tell_key"):
        print(f"server_args=ServerArgs(api_key='{key}')", flush=True)
    state = State(arguments, key)
    if arguments.plan.get("worker"):
        state.worker = child("VLLM::Worker", orphan=False)
    if arguments.plan.get("orphan"):
        child("sglang::scheduler", orphan=True)
    if arguments.plan.get("segment_mib"):
        segment(arguments.plan["segment_mib"])
    if arguments.plan.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    load(arguments.plan.get("load", []))
    Handler.state = state
    ThreadingHTTPServer.allow_reuse_port = True  # as engines do
    ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    server.daemon_threads = True

    def stop(_number: int, _frame: Any) -> None:
        state.closing = True
        threading.Thread(target=shut, daemon=True).start()

    def shut() -> None:
        end = time.monotonic() + arguments.shutdown_timeout
        while state.running and time.monotonic() < end:
            time.sleep(0.05)
        server.shutdown()

    if arguments.plan.get("deaf") is not True:
        signal.signal(signal.SIGTERM, stop)
    print(f"LISTENING {time.time():.3f}", flush=True)
    server.serve_forever(poll_interval=0.05)
    if state.worker:
        state.worker.terminate()


if __name__ == "__main__":
    main()
