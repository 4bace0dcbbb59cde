"""docs/messages.md lists every failure message of the product, with a cause and a cure, and none that is gone."""

from __future__ import annotations

import ast

from tests.unit.failure_messages import _failures, _raised, listed, messages


def test_every_message_is_listed() -> None:
    missing = [f"{place}: {message}" for message, place in messages().items() if message not in listed()]
    assert not missing, "add these to docs/messages.md (python -m tests.unit.failure_messages):\n" + "\n".join(missing)


def test_nothing_else_is_listed() -> None:
    assert not sorted(listed().keys() - messages().keys())


def test_every_message_has_a_cause_and_a_cure() -> None:
    assert not [message for message, (cause, cure) in listed().items() if len(cause) < 8 or len(cure) < 5]


def test_what_counts_as_a_message() -> None:
    code = """
raise RunFailed(f"{a}: no {b}" "thing" + c)
yield from refuse("stop `it`")
raise SecretError(str(error))
raise Busy("at work")
print("not a failure")
"""
    tree = ast.parse(code)
    assert [text for _, text in _raised(tree, _failures(tree))] == ["...: no ...thing...", "at work", "stop 'it'"]
