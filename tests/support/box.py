"""What the sandbox's catalogue says, for tests on a box: they name its configurations and read the rest here."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from typing import Any

import yaml

from rig.catalog.entries import load_catalog
from tests.support.plans import SHIPPED

OVERLAY = SHIPPED / "overlays" / "sandbox.yaml"
BASE = "vllm-base"
CATALOG = load_catalog(OVERLAY.name, SHIPPED)
RELEASE = CATALOG.serving[BASE].release
LOCK = CATALOG.releases[RELEASE].lock.format(python="311")
PORT = CATALOG.serving[BASE].listen.port
CONFIGURATIONS: list[str] = runpy.run_path(str(SHIPPED / "group_data" / "sandbox.py"))["configurations"]
LIMIT = CATALOG.serving[BASE].max_running_requests


def drafted_a_step(configuration: str) -> int:
    """Tokens that its drafter guesses a step."""
    speculation = CATALOG.serving[configuration].speculation
    assert speculation is not None
    return speculation.steps


def overlay_with(limit: int | None = None, releases: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The text of the sandbox's overlay with another limit of running requests, and changes of releases."""
    content = yaml.safe_load(OVERLAY.read_text(encoding="utf-8"))
    if limit is not None:
        content["serving"]["vllm-*"]["max_running_requests"] = limit
    for name, change in (releases or {}).items():
        content.setdefault("releases", {}).setdefault(name, {}).update(change)
    return yaml.safe_dump(content)
