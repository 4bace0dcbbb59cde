"""Facts that programs of ours leave for each other: JSON objects, written in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when it is absent or unreadable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object in one step."""
    write_text(path, json.dumps(content) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.chmod(0o644)  # no secrets in there; anyone may ask `rigctl status`
    temporary.replace(path)
