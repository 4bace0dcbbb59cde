"""Asking one prompt of the quality canary, and whether the answer holds what it must."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rigctl import builder
from rigctl.contract.canary import Call, Haystack, Prompt, Tool
from rigctl.contract.foreign import one_line
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.readiness import degenerate, reasoning_of

SAMPLE = range(1000, 1008)
"""Numbers of the sentences by which the tokens of one are measured."""
PROGRAM_SECONDS, PROGRAM_BYTES = 20, 1 << 16
RUNNER = """
import contextlib, io, json, sys
asked = json.load(sys.stdin)
names = {"__name__": "answer"}
with contextlib.redirect_stdout(io.StringIO()):
    exec(asked["code"], names)
    found = [eval(call, names) for call in asked["calls"]]
print(json.dumps(found))
"""


def asked(engine: Engine, prompt: Prompt) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, answer, and tool calls (name, arguments) to a prompt, greedily. Raises one of BAD_ANSWERS."""
    specification = engine.specification
    context = specification.checkpoints.context or engine.context()
    tokens = min(prompt.tokens or specification.answer.tokens, context // 2)
    question = prompt.ask
    if prompt.haystack:
        question = f"{haystack(engine, prompt.haystack, question, context - tokens)}\n\n{question}"
    more: dict[str, Any] = {"tools": [_declared(prompt.tool)]} if prompt.tool else {}
    message = engine.chat(
        [{"role": "user", "content": question}],
        max_tokens=tokens,
        timeout=specification.limits.acceptance_seconds,
        **more,
        **prompt.request,
    )["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return reasoning_of(message), message.get("content") or "", calls


def _declared(tool: Tool) -> Mapping[str, Any]:
    return {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}


def haystack(engine: Engine, wanted: Haystack, question: str, room: int) -> str:
    """The long text, as long as its share of `room` tokens says; the engine counts them."""
    alone = _tokens(engine, question)
    sample = _tokens(engine, f"{_sentences(wanted, SAMPLE)}\n\n{question}")
    each = max(1.0, (sample - alone) / len(SAMPLE))
    # The tokens of a byte are at most one each.
    left = wanted.share * (room - alone - len(wanted.hidden.encode()))
    lines = [_sentences(wanted, [number]) for number in range(1, max(1, math.floor(left / each)) + 1)]
    lines.insert(round(wanted.depth * len(lines)), wanted.hidden)
    return " ".join(lines)


def _sentences(wanted: Haystack, numbers: Sequence[int]) -> str:
    return " ".join(f"{number}. {wanted.sentence}" for number in numbers)


def _tokens(engine: Engine, question: str) -> int:
    answer = engine.completion(question, timeout=engine.specification.limits.acceptance_seconds, max_tokens=1)
    return int(answer["usage"]["prompt_tokens"])


def digest(reasoning: str, answer: str, calls: Sequence[tuple[str, str]]) -> str:
    """Equal for equal answers."""
    return hashlib.sha256(json.dumps([reasoning, answer, calls]).encode()).hexdigest()


def faults(engine: Engine, prompt: Prompt, reasoning: str, answer: str, calls: Sequence[tuple[str, str]]) -> list[str]:
    """What does not hold of an answer; empty when all does. Raises RigctlError where code cannot be run safely."""
    return list(_faults(engine, prompt, reasoning, answer, calls))


def _faults(
    engine: Engine, prompt: Prompt, reasoning: str, answer: str, calls: Sequence[tuple[str, str]]
) -> Iterator[str]:
    for part, text in (("reasoning", reasoning), ("answer", answer)):
        if problem := degenerate(text, engine.specification.limits):
            yield f"{part} is degenerate: {problem}"
    for part, text, wanted in (("reasoning", reasoning, prompt.reasoning), ("answer", answer, prompt.answer)):
        if wanted is not None and text.strip() != wanted.strip():
            yield f"{part} is another: {_shown(text)}"
    plain = " ".join(answer.split()).casefold()
    for words in prompt.says:
        if words.casefold() not in plain:
            yield f"does not say {words!r}: {_shown(answer)}"
    if prompt.number is not None:
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
        found = float(numbers[-1].replace(",", "")) if numbers else None
        if found is None or not math.isclose(found, prompt.number):
            yield f"{prompt.number:g} was expected: {_shown(answer)}"
    if prompt.tool:
        yield from _of_call(prompt.tool, calls)
    if prompt.calls:
        yield from _of_code(prompt.calls, answer)


def _shown(text: str) -> str:
    return one_line(text.strip(), 80) or "nothing came"


def _of_call(tool: Tool, calls: Sequence[tuple[str, str]]) -> Iterator[str]:
    if not calls:
        yield f"{tool.name} was not called"
        return
    name, text = calls[0]
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if name != tool.name or not isinstance(arguments, dict):
        yield f"{tool.name} was expected: {_shown(f'{name}({text})')}"
        return
    for key, wanted in tool.arguments.items():
        found = arguments.get(key)
        said = isinstance(wanted, str) and wanted.casefold() in str(found).casefold()
        if not said and found != wanted:
            yield f"{tool.name}: {key} is {_shown(repr(found))}, not {wanted!r}"


def _of_code(calls: Sequence[Call], answer: str) -> Iterator[str]:
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", answer, re.DOTALL)
    if not blocks:
        yield f"there is no block of code: {_shown(answer)}"
        return
    found = values(blocks[-1], [one.call for one in calls])
    if isinstance(found, str):
        yield found
        return
    for one, value in zip(calls, found, strict=True):
        if value != one.gives:
            yield f"{one.call} gives {_shown(repr(value))}, not {one.gives!r}"


def values(code: str, calls: Sequence[str]) -> list[Any] | str:
    """What the calls give after the code, run as the builder without a network, or why they give nothing.

    A model's code is nobody's: it is not run as root, nor as the engine's user, who can reach its other engines.
    """
    argv = ["/usr/bin/python3", "-I", "-c", RUNNER]
    limits = ["MemoryMax=512M", "TasksMax=16", "CPUQuota=100%"]
    with (
        builder.sandboxed(argv, unit="canary", seconds=PROGRAM_SECONDS, properties=limits) as command,
        tempfile.TemporaryFile() as given,
    ):
        given.write(json.dumps({"code": code, "calls": list(calls)}).encode())
        given.seek(0)
        with subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=PROGRAM_BYTES
        ) as process:
            said = process.stdout.read(PROGRAM_BYTES) if process.stdout else b""
    try:
        found = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return f"the code does not run (in {PROGRAM_SECONDS} s), or its values are no JSON"
    return found if isinstance(found, list) and len(found) == len(calls) else "the code does not give its values"
