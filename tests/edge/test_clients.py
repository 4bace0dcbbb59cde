"""The client that most programs are written with: OpenAI's, over TLS, with streams, tools and its own retries."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.edge.conftest import Edge, Engine, Maker
from tests.standin import ANSWER

KEY = "alices-key-0123456789"

CLIENT = """
import json, ssl, sys
import openai

url, authority, key = sys.argv[1:]
client = openai.OpenAI(
    base_url=url + "/v1",
    api_key=key,
    http_client=openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=authority)),
)
question = [{"role": "user", "content": "What is a token?"}]
tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
try:
    found = {
        "models": [model.id for model in client.models.list()],
        "answer": client.chat.completions.create(model="kimi", messages=question).choices[0].message.content,
        "stream": "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model="kimi", messages=question, stream=True)
        ),
        "call": client.chat.completions.create(model="kimi", messages=question, tools=[tool])
        .choices[0].message.tool_calls[0].function.name,
        "streamed call": [
            call.function.name
            for chunk in client.chat.completions.create(model="kimi", messages=question, tools=[tool], stream=True)
            for call in chunk.choices[0].delta.tool_calls or []
        ],
    }
except openai.APIStatusError as error:
    found = {"status": error.status_code, "class": type(error).__name__, "message": error.message, "code": error.code}
print(json.dumps(found))
"""


def client(edge: Edge, key: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CLIENT, edge.url, str(edge.certificate), key]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"make test installs requirements/clients.txt: {done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def pair(make: Maker) -> tuple[Edge, Engine]:
    return make({"alice": KEY})


def test_answers_streams_and_tools(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    found = client(edge, KEY)
    assert found.pop("stream").strip() == ANSWER
    assert found == {"models": ["kimi"], "answer": ANSWER, "call": "get_weather", "streamed call": ["get_weather"]}


def test_a_wrong_key_is_the_clients_own_error(pair: tuple[Edge, Engine]) -> None:
    edge, _ = pair
    found = client(edge, "wrong")
    assert (found["status"], found["class"], found["code"]) == (401, "AuthenticationError", "invalid_api_key")
    assert "API key" in found["message"]
