"""Ready means accepted: an engine counts as serving once it has really answered.

/health alone has been 200 on frozen engines (vllm PR#36451), and an engine can die of its first request. So it is asked
who it is, for a completion, for a tool call where a parser is configured, and whether its drafter is at work.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import requests

from rigctl.client import Engine, Speculation

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
# A tool call and its reasoning fit well below this; the answer to QUESTION may end earlier by itself.
MAX_TOKENS = 512
SHORT_MAX_TOKENS = 128
# Words needed before repetition can be judged, and the share of one word that no language reaches.
JUDGED_WORDS = 8
REPEATED_SHARE = 0.6


class NotAccepted(Exception):
    """The engine answers, but not as a serving engine must. Says what was asked and what came."""


def accept(engine: Engine) -> dict[str, Any]:
    """Ask an engine that listens; what it proved, with seconds for each probe.

    Raises NotAccepted with the first probe that failed.
    """
    specification = engine.specification
    probes: list[tuple[str, Callable[[Engine], Any]]] = [("identity", _identity), ("completion", _completion)]
    if specification.tool_call_parser:
        probes.append(("tool_call", _tool_call))
    before = engine.speculation() if specification.speculation else None
    proved: dict[str, Any] = {}
    for name, probe in probes:
        started = time.monotonic()
        try:
            answer = probe(engine)
        except requests.RequestException as error:
            raise NotAccepted(f"{name}: no answer: {_reason(error)}") from None
        proved[name] = {"seconds": round(time.monotonic() - started, 3), **answer}
    if specification.speculation:
        proved["speculation"] = _speculation(engine, before)
    return proved


def _identity(engine: Engine) -> dict[str, Any]:
    models = engine.models()
    if engine.specification.model not in models:
        raise NotAccepted(f"identity: serves {', '.join(models)}, not {engine.specification.model}")
    return {"model": engine.specification.model}


def _completion(engine: Engine) -> dict[str, Any]:
    choice = engine.chat(QUESTION, max_tokens=SHORT_MAX_TOKENS)
    message = choice["message"]
    reasoning, content = reasoning_of(message), message.get("content") or ""
    for part, text in (("reasoning", reasoning), ("content", content)):
        if problem := degenerate(text):
            raise NotAccepted(f"completion: {part} is degenerate: {problem}: {text[:80]!r}")
    # A reasoning model may still think when the tokens end; then there is no content yet.
    if not content.strip() and not (reasoning.strip() and choice.get("finish_reason") == "length"):
        raise NotAccepted("completion: the answer is empty")
    return {"words": len(content.split()), "finish_reason": choice.get("finish_reason")}


def _tool_call(engine: Engine) -> dict[str, Any]:
    question = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    message = engine.chat(question, tools=[WEATHER], max_tokens=MAX_TOKENS)["message"]
    calls = message.get("tool_calls") or []
    if not calls:
        raise NotAccepted(f"tool_call: no call came, but {(message.get('content') or reasoning_of(message))[:80]!r}")
    function = calls[0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        raise NotAccepted(f"tool_call: arguments are no JSON: {function['arguments'][:80]!r}") from None
    if function["name"] != "get_weather" or not isinstance(arguments, dict):
        raise NotAccepted(f"tool_call: {function['name']}({function['arguments'][:80]}) was not asked for")
    return {"name": function["name"]}


def _speculation(engine: Engine, before: Speculation | None) -> dict[str, Any]:
    after = engine.speculation()
    if after is None:
        if engine.specification.engine == "sglang":
            return {"counters": "this release exports none"}
        raise NotAccepted("speculation: a drafter is configured, but the engine counts no drafts")
    moved = after.since(before or Speculation(0, 0, 0))
    if moved.drafts <= 0:
        raise NotAccepted("speculation: the counters did not move: the drafter is not used")
    return {"drafts": moved.drafts, "drafted": moved.drafted, "accepted": moved.accepted}


def reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning of an answer; vLLM calls the field `reasoning`, older releases and SGLang `reasoning_content`."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def degenerate(text: str) -> str | None:
    """Why a text cannot come from a sound model (one word or character over and over); None when it can."""
    if "\ufffd" in text:
        return "it holds bytes that are no UTF-8"
    stripped = "".join(text.split())
    if len(stripped) >= JUDGED_WORDS and len(set(stripped)) == 1:
        return "it is one character repeated"
    words = text.split()
    if len(words) >= JUDGED_WORDS:
        word, count = Counter(words).most_common(1)[0]
        if count > REPEATED_SHARE * len(words):
            return f"{word!r} is {count} of its {len(words)} words"
    return None


def _reason(error: requests.RequestException) -> str:
    if error.response is not None:
        return f"HTTP {error.response.status_code}: {error.response.text[:120]}"
    return type(error).__name__
