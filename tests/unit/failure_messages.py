"""Every failure message that the product's code can raise, read from its syntax: variable parts are written as "...".

`python -m tests.unit.failure_messages` prints those that docs/messages.md does not list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "messages.md"
SOURCES = ("rig", "tasks", "files/hostkit/rigctl")
ROW = re.compile(r"^\| `(?P<message>[^`]+)` \| (?P<cause>[^|]+) \| (?P<cure>[^|]+) \|$", re.MULTILINE)


def messages() -> dict[str, str]:
    """Message -> the place it is raised at ("rig/cli/converge.py:101")."""
    found: dict[str, str] = {}
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node, text in _raised(tree, _failures(tree)):
                found.setdefault(text, f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def listed() -> dict[str, tuple[str, str]]:
    """Message -> cause and cure, as the page has them."""
    rows = ROW.finditer(PAGE.read_text(encoding="utf-8"))
    return {row["message"]: (row["cause"].strip(), row["cure"].strip()) for row in rows}


def _failures(tree: ast.Module) -> set[str]:
    """Names whose calls are failures: exceptions (by their name, or because they are raised) and our own refusal."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    known = {name for name in names if re.fullmatch(r"[A-Z]\w*(Error|Failed|Accepted|Refused)|refuse", name)}
    return known | {_name(n.exc) for n in ast.walk(tree) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)}


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _raised(tree: ast.Module, failures: set[str]) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _name(node) in failures:
            # Without words of its own it passes on another failure's.
            text = re.sub(r"\s+", " ", skeleton(node.args[0])).strip()
            if re.search(r"[a-z]{3}", text):
                yield node, text


def skeleton(node: ast.expr) -> str:
    """The constant parts of a string expression, with "..." for the rest."""
    match node:
        case ast.Constant(value=str(text)):
            return text.replace("`", "'").replace("|", "/")
        case ast.JoinedStr(values=parts):
            return re.sub(r"(\.\.\.)+", "...", "".join(skeleton(part) for part in parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return re.sub(r"(\.\.\.)+", "...", skeleton(left) + skeleton(right))
        case _:
            return "..."


if __name__ == "__main__":
    for message, place in messages().items():
        if message not in listed():
            print(f"{place}\n| `{message}` |  |  |")
