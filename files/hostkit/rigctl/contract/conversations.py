"""Prompts of a training: JSONL of conversations, written by anybody. Read strictly; divided by conversation, never
by row."""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rigctl.contract.foreign import one_line
from rigctl.contract.order import faults
from rigctl.errors import RigctlError
from rigctl.reached import readable

LONGEST_LINE = 4 << 20
"""Characters of one conversation."""


class Message(BaseModel):
    """One turn. Answers of an assistant may be there: the target's own take their place."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.role != "assistant" and not (self.content or "").strip():
            raise ValueError(f"a message of {self.role} without text")
        return self


class Conversation(BaseModel):
    """One line of a file of prompts. Keys beyond these are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    id: str | None = None

    @model_validator(mode="after")
    def _can_be_answered(self) -> "Conversation":
        roles = [message.role for message in self.messages]
        if "user" not in roles:
            raise ValueError("no message of a user")
        if "system" in roles[1:]:
            raise ValueError("a message of the system comes first or not at all")
        if "tool" in roles and not self.tools:
            raise ValueError("a result of a tool in a conversation that declares no tools")
        for tool in self.tools or []:
            function = tool.get("function")
            if (
                tool.get("type") != "function"
                or not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
            ):
                raise ValueError('a tool is {"type": "function", "function": {"name": ...}}')
        return self


@dataclass(frozen=True)
class Prompt:
    """A conversation under the id by which its answers are found again."""

    id: str
    domain: str
    conversation: Conversation

    def row(self) -> dict[str, Any]:
        """As `speculators regenerate-responses` reads it."""
        said = [{"role": one.role, "content": one.content or ""} for one in self.conversation.messages]
        tools = {"tools": self.conversation.tools} if self.conversation.tools else {}
        return {"id": self.id, "messages": said, **tools}


def read(path: Path, domain: str) -> Iterator[Prompt]:
    """The conversations of one file. Raises RigctlError that names file and line for anything else.

    Ids are ours: domain and a digest of the messages, so that an edit of one line leaves the answers to the others.
    """
    with readable(path) as handle:
        for number, raw in enumerate(lines(handle, path), 1):
            where = f"{path}:{number}"
            if not raw.strip():
                continue
            document: object = None
            try:
                document = json.loads(raw.decode())
                found = Conversation.model_validate(document)
            except UnicodeDecodeError:
                raise RigctlError(f"{where}: not UTF-8") from None
            except ValidationError as error:
                raise RigctlError(f"{where}: {one_line(next(iter(faults(error, Conversation, document))))}") from None
            except (ValueError, RecursionError) as error:
                raise RigctlError(f"{where}: not JSON: {one_line(error)}") from None
            told = json.dumps([found.model_dump(exclude={"id"})], sort_keys=True, ensure_ascii=True)
            yield Prompt(f"{domain}-{hashlib.sha256(told.encode()).hexdigest()[:16]}", domain, found)


def lines(handle: Any, path: Path) -> Iterator[bytes]:
    """Lines of a file of prompts. Raises RigctlError for one that is longer than any conversation."""
    number, buffered = 0, io.BufferedReader(handle)
    while line := buffered.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise RigctlError(f"{path}:{number}: longer than {LONGEST_LINE >> 20} MiB: not one conversation")
        yield line


def unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Each conversation once: the same one in training and held out would be learnt by heart."""
    return list({prompt.id: prompt for prompt in prompts}.values())


@dataclass(frozen=True)
class Split:
    """Training conversations in the order in which rungs take them, and those that nothing is trained on."""

    training: list[Prompt]
    held_out: list[Prompt]


def split(prompts: Sequence[Prompt], share: float, seed: int, largest: int) -> Split:
    """Divide by conversation: the same for the same ids and seed, whatever their order, and for every rung.

    share: of the conversations that the largest rung needs, held out in each domain alike. Raises RigctlError where
    there are not enough.
    """
    order = sorted(prompts, key=lambda one: hashlib.sha256(f"{seed}:{one.id}".encode()).digest())
    wanted = min(len(order), math.ceil(largest / (1 - share)))
    domains: dict[str, list[Prompt]] = {}
    for prompt in order:
        domains.setdefault(prompt.domain, []).append(prompt)
    held = {
        prompt.id
        for found in domains.values()
        for prompt in found[: max(1, round(share * wanted * len(found) / len(order)))]
    }
    training = [prompt for prompt in order if prompt.id not in held]
    if len(training) < largest:
        raise RigctlError(
            f"the ladder asks for {largest} conversations to train on; the prompts are {len(order)} different "
            f"ones, {len(held)} of them held out: shorten the ladder or add prompts"
        )
    return Split(training[:largest], [prompt for prompt in order if prompt.id in held])
