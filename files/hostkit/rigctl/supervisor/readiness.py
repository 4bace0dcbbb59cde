"""Ready means accepted: an engine counts as serving once it has really answered.

/health alone has been 200 on frozen engines (vllm PR#36451), and an engine can die of its first request. So it is asked
who it is, for a completion, for a tool call where a parser is configured, and whether its speculation is at work.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import requests

from rigctl.contract.foreign import one_line
from rigctl.contract.limits import Limits
from rigctl.contract.speculation import EXTRACTS
from rigctl.errors import RigctlError
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine, Speculation

QUESTION = [{"role": "user", "content": "In one sentence: what is a token?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}
# Of some length, and in an order of words that no model writes by itself.
PASSAGE = (
    "Copper kettle, seven ladders, a green harbour; the clerk counts lanterns before noon. Copper kettle, seven "
    "ladders, a green harbour; the clerk counts barrels after dusk. Nobody weighs the salt twice, and nobody paints "
    "the north gate."
)
COPY = [{"role": "user", "content": f"Repeat this text word for word, and write nothing else:\n\n{PASSAGE}"}]
COPIED_WORDS = 12
# The answer to QUESTION may end earlier by itself.
SHORT_MAX_TOKENS = 128


class NotAccepted(Exception):
    """The engine answers, but not as a serving engine must. Says what was asked and what came."""


# Asked without the key: (method, path, what it gives away). An empty body starts nothing: a guarded route says 401 or
# 403 first, an open one complains about the body.
ROUTES = [
    ("GET", "/v1/models", "must be guarded"),
    ("POST", "/v1/completions", "must be guarded"),
    ("POST", "/v1/chat/completions", "must be guarded"),
    ("POST", "/v1/embeddings", "must be guarded"),
    ("POST", "/generate", "generates"),
    ("POST", "/invocations", "generates"),
    ("POST", "/inference/v1/generate", "generates"),
    ("POST", "/tokenize", "tokenizes"),
    ("POST", "/detokenize", "tokenizes"),
    ("POST", "/pooling", "computes"),
    ("POST", "/score", "computes"),
    ("POST", "/rerank", "computes"),
    ("GET", "/health", "tells its state"),
    ("GET", "/ping", "tells its state"),
    ("GET", "/load", "tells its load"),
    ("GET", "/metrics", "tells its counters"),
    ("GET", "/version", "tells its version"),
    ("GET", "/server_info", "tells its settings"),
    ("GET", "/get_server_info", "tells its settings"),
    ("GET", "/model_info", "tells its settings"),
    ("GET", "/docs", "tells its interface"),
    ("GET", "/openapi.json", "tells its interface"),
]
# For routes that only the engine itself lists, some of which change what it does: no route has this method, and both
# engines ask for the key before they look for a route (as middleware), so 405 says that no key was asked for.
NO_METHOD = "PROPFIND"


def accept(engine: Engine) -> dict[str, Any]:
    """Ask an engine that listens; what it proved, with seconds for each probe.

    Raises NotAccepted with every verdict that is against it.
    """
    specification = engine.specification
    probes: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("identity", lambda: _identity(engine)),
        ("completion", lambda: _completion(engine)),
    ]
    if specification.tool_call_parser:
        probes.append(("tool_call", lambda: _tool_call(engine)))
    if specification.speculation:
        before = _counters(engine)
        how = {"ngram": _ngram, EXTRACTS: _extraction}.get(specification.speculation.method, _speculation)
        probes.append(("speculation", lambda: how(engine, before)))
    if specification.api_key:
        probes.append(("routes", lambda: _routes(engine, Engine(specification))))
    proved: dict[str, Any] = {}
    refused: list[str] = []
    for name, probe in probes:
        started = time.monotonic()
        try:
            proved[name] = {**probe(), "seconds": round(time.monotonic() - started, 3)}
        except BAD_ANSWERS as error:
            # It may hang or be dead: further questions would only make the operator wait.
            raise NotAccepted("; ".join([*refused, f"{name}: no answer: {reason(error)}"])) from None
        except NotAccepted as error:
            refused.append(str(error))
    if refused:
        # A degenerate model drafts itself perfectly: the operator sees both verdicts.
        counted = proved.get("speculation", {})
        also = f" (speculation: {counted['accepted']}/{counted['drafted']} accepted)" if "drafted" in counted else ""
        raise NotAccepted("; ".join(refused) + also)
    return proved


def _counters(engine: Engine) -> Speculation | None:
    try:
        return engine.metrics().speculation
    except BAD_ANSWERS as error:
        raise NotAccepted(f"speculation: /metrics does not answer: {reason(error)}") from None


def _routes(engine: Engine, stranger: Engine) -> dict[str, Any]:
    """What the engine answers to one who has no key. vLLM guards /v1 alone, SGLang lets /health* and /metrics* pass."""
    known = {path for _, path, _ in ROUTES}
    listed = {path: methods for path, methods in engine.routes().items() if path not in known}
    open_routes = []
    for method, path, gives in [*ROUTES, *((NO_METHOD, path, "listed by the engine") for path in listed)]:
        status = stranger.status_of(method, path)
        if status in (401, 403, 404) or (status == 405 and method != NO_METHOD):
            continue
        if gives == "must be guarded":
            raise NotAccepted(f"routes: {method} {path} answers {status} without the API key: the key is not in force")
        open_routes.append(f"{listed.get(path, method)} {path} ({gives})")
    return {"asked": len(ROUTES) + len(listed), "open_without_key": open_routes}


def _identity(engine: Engine) -> dict[str, Any]:
    models = engine.models()
    if engine.specification.model not in models:
        raise NotAccepted(f"identity: serves {one_line(', '.join(models))}, not {engine.specification.model}")
    return {"model": engine.specification.model}


def _ask(engine: Engine, question: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """A question to which the model may think as long as its family does."""
    tokens = engine.specification.answer.tokens
    return engine.chat(question, max_tokens=tokens, timeout=_patience(engine), **more)


def _patience(engine: Engine) -> float:
    return engine.specification.limits.acceptance_seconds


def _completion(engine: Engine) -> dict[str, Any]:
    choice = engine.chat(QUESTION, max_tokens=SHORT_MAX_TOKENS, timeout=_patience(engine))
    message = choice["message"]
    reasoning, content = reasoning_of(message), message.get("content") or ""
    for part, text in (("reasoning", reasoning), ("content", content)):
        if problem := degenerate(text, engine.specification.limits):
            raise NotAccepted(f"completion: {part} is degenerate: {problem}: {text[:80]!r}")
    # A reasoning model may still think when the tokens end; then there is no content yet.
    if not content.strip() and not (reasoning.strip() and choice.get("finish_reason") == "length"):
        raise NotAccepted("completion: the answer is empty")
    if engine.specification.reasoning_parser:
        if "<think>" in content or "</think>" in content:
            raise NotAccepted(f"completion: reasoning is not separated from the answer: {content[:80]!r}")
        if engine.specification.answer.thinks == "always" and not reasoning.strip():
            raise NotAccepted(f"completion: a reasoning parser is configured, but no reasoning came: {content[:80]!r}")
    return {"words": len(content.split()), "finish_reason": choice.get("finish_reason")}


def _tool_call(engine: Engine) -> dict[str, Any]:
    question = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    choice = _ask(engine, question, tools=[WEATHER])
    message = choice["message"]
    calls = message.get("tool_calls") or []
    if not calls:
        raise NotAccepted(f"tool_call: no call came, but {(message.get('content') or reasoning_of(message))[:80]!r}")
    function = calls[0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        raise NotAccepted(f"tool_call: arguments are no JSON: {function['arguments'][:80]!r}") from None
    if function["name"] != "get_weather" or not isinstance(arguments, dict):
        called = one_line(f"{function['name']}({function['arguments']})", 160)
        raise NotAccepted(f"tool_call: {called} was not asked for")
    return {"name": function["name"]}


def _speculation(engine: Engine, before: Speculation | None) -> dict[str, Any]:
    after = _settled(engine, before)
    if after is None:
        length = engine.metrics().own_length
        if length is not None:
            if length <= 0:
                raise NotAccepted("speculation: the engine's own acceptance length is 0: nothing is drafted")
            return {"own_length": length, "counters": "this release exports none"}
        raise NotAccepted("speculation: it is configured, but the engine counts no drafts")
    moved = after.since(before or Speculation(0, 0, 0))
    if moved.drafts <= 0:
        raise NotAccepted("speculation: the counters did not move: nothing is drafted")
    return {"drafts": moved.drafts, "drafted": moved.drafted, "accepted": moved.accepted}


def _ngram(engine: Engine, before: Speculation | None) -> dict[str, Any]:
    """N-gram drafts where a text repeats itself, so it is asked to. What repeated nothing is no failure."""
    message = _ask(engine, COPY)["message"]
    try:
        return _speculation(engine, before)
    except NotAccepted:
        if _copies(f"{reasoning_of(message)}\n{message.get('content') or ''}"):
            raise
    return {"drafts": 0, "found": "the model did not repeat the text, so there was nothing to draft"}


def _extraction(engine: Engine, before: Speculation | None) -> dict[str, Any]:
    """What writes states down counts a draft a step, and drafts nothing that could be accepted."""
    proved = _speculation(engine, before)
    if proved.get("accepted"):
        raise NotAccepted(f"speculation: {proved['accepted']} tokens were accepted, where nothing is to be drafted")
    return proved


def _copies(text: str) -> bool:
    """Whether a text has a run of the passage's words in it."""
    words, whole = PASSAGE.split(), " ".join(text.split())
    runs = (words[start : start + COPIED_WORDS] for start in range(len(words) - COPIED_WORDS + 1))
    return any(" ".join(run) in whole for run in runs)


def _settled(engine: Engine, before: Speculation | None) -> Speculation | None:
    """The counters once they have moved; engines write them down a moment after the answer."""
    end = time.monotonic() + engine.specification.limits.settle_seconds
    while True:
        after = engine.metrics().speculation
        moved = after is not None and after.drafts > (before.drafts if before else 0)
        if moved or time.monotonic() > end:
            return after
        time.sleep(0.1)


def reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning of an answer; vLLM calls the field `reasoning`, older releases and SGLang `reasoning_content`."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def degenerate(text: str, limits: Limits) -> str | None:
    """Why a text cannot come from a sound model (one word or character over and over); None when it can."""
    if "\ufffd" in text:
        return "it holds bytes that are no UTF-8"
    stripped = "".join(text.split())
    if len(stripped) >= limits.repeated_words and len(set(stripped)) == 1:
        return "it is one character repeated"
    words = text.split()
    if len(words) >= limits.repeated_words:
        word, count = Counter(words).most_common(1)[0]
        if count > limits.repeated_share * len(words):
            return f"{one_line(word, 40)!r} is {count} of its {len(words)} words"
    return None


def reason(error: Exception) -> str:
    """One of BAD_ANSWERS in a few words."""
    if isinstance(error, RigctlError):
        return str(error)
    if not isinstance(error, requests.RequestException) or isinstance(error, ValueError):
        return f"what came is not as the protocol has it: {error!r}"[:160]
    if error.response is not None:
        return f"HTTP {error.response.status_code}: {one_line(error.response.text, 120)}"
    return type(error).__name__
