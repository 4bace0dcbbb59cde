"""Answers of gpt-oss-120b on vLLM, built after threads. Nothing here was recorded: no engine here can serve it (MXFP4).

Keys and states are those that the threads show, the words are ours: vllm#22403 a plain answer, vllm#22337 and
vllm#22578 a tool call that the engine did not parse, vllm#41902 the key `reasoning`, and an answer without any text.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rig.catalog.canary import canary_prompts
from rig.catalog.entries import load_catalog
from rigctl.contract.canary import Prompt
from rigctl.services.canary_checks import asked, faults
from rigctl.supervisor.readiness import NotAccepted, _completion, _tool_call
from tests.support.plans import SHIPPED
from tests.unit.serving import specification

FAMILY = load_catalog(None, SHIPPED).families["gpt-oss"]
PARSERS = FAMILY.parsers["vllm"]
THOUGHT = "The user asks what a token is. One sentence will do, without a list."
EMPTY = {"refusal": None, "annotations": None, "audio": None, "function_call": None}


def answers(**message: Any) -> Any:
    """An engine that gives this message; newer releases call the reasoning `reasoning`."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **EMPTY, "tool_calls": [], **message},
        "finish_reason": "stop",
    }
    served = specification(
        family="gpt-oss",
        tool_call_parser=PARSERS.tool,
        reasoning_parser=PARSERS.reasoning,
        answer=FAMILY.answer.model_dump(),
        speculation=None,
    )
    return SimpleNamespace(specification=served, chat=lambda *_, **__: choice)


def called(name: str, arguments: str) -> list[dict[str, Any]]:
    return [{"id": "chatcmpl-tool-1", "type": "function", "function": {"name": name, "arguments": arguments}}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_a_plain_answer_is_accepted(key: str) -> None:
    proved = _completion(answers(content="A token is a piece of a word.", **{key: THOUGHT}))
    assert proved == {"words": 8, "finish_reason": "stop"}


def test_an_answer_without_its_reasoning_is_not() -> None:
    with pytest.raises(NotAccepted, match="no reasoning came"):
        _completion(answers(content="A token is a piece of a word.", reasoning_content=None))


def test_an_answer_without_any_text_is_not() -> None:
    with pytest.raises(NotAccepted, match="the answer is empty"):
        _completion(answers(content=None, reasoning=None))


def test_a_tool_call_is_accepted() -> None:
    calls = called("get_weather", '{\n  "city": "Paris"\n}')
    assert _tool_call(answers(content=None, reasoning_content=THOUGHT, tool_calls=calls)) == {"name": "get_weather"}


@pytest.mark.parametrize(
    "content",
    ['[{ "name": "get_weather", "parameters": { "city": "Paris" } }]', "I have no access to live data on the weather."],
)
def test_a_tool_call_that_was_not_parsed_is_not(content: str) -> None:
    with pytest.raises(NotAccepted, match="no call came, but"):
        _tool_call(answers(content=content, reasoning_content=THOUGHT))


def test_arguments_that_were_cut_are_not() -> None:
    with pytest.raises(NotAccepted, match="arguments are no JSON"):
        _tool_call(answers(content=None, tool_calls=called("get_weather", '{"city": "Par')))


def test_the_canary_reads_its_answers() -> None:
    weather = next(one for one in canary_prompts("general", SHIPPED).prompts if one.name == "weather")
    engine = answers(
        content=None,
        reasoning=THOUGHT,
        tool_calls=called("get_weather", json.dumps({"city": "Lisbon", "unit": "celsius"})),
    )
    assert not faults(engine, weather, *asked(engine, weather))
    leaked = answers(content="<|channel|>analysis<|message|>" * 9, reasoning=None)
    fact = Prompt(name="x", ask="y", says=["token"])
    assert faults(leaked, fact, *asked(leaked, fact))
