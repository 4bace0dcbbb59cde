"""What an installed engine knows by name: model architectures, methods of speculation, parsers. Read from its source.

Nothing is imported: an engine takes 10 s and more to import, and what it registers is data in its files. Read so in
vLLM 0.16.0, 0.17.1, 0.26.0, 0.32.0 and 0.33.0 and in SGLang 0.5.9, 0.5.16 and 0.5.23.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rigctl.errors import RigctlError


@dataclass(frozen=True)
class Registry:
    """Names that an engine release knows."""

    architectures: frozenset[str]
    """Of a config.json: models and drafters."""
    methods: frozenset[str]
    """Of speculation, in the engine's own words."""
    tool_parsers: frozenset[str]
    reasoning_parsers: frozenset[str]


def read(environment: Path, engine: str) -> Registry:
    """The registry of the engine in a virtual environment. Raises RigctlError where it cannot be read."""
    return Registry(**{what: _names(environment, engine, what) for what in READERS[engine]})


def architectures(environment: Path, engine: str) -> frozenset[str]:
    """The architectures alone. Raises RigctlError."""
    return _names(environment, engine, "architectures")


def _names(environment: Path, engine: str, what: str) -> frozenset[str]:
    place, reader = READERS[engine][what]
    places = [*environment.glob(f"lib/python3.*/site-packages/{place}")]
    found = frozenset(reader(places[0])) if places else frozenset()
    if not found:
        where = f"{environment}: no {what.replace('_', ' ')} are found in {place}"
        raise RigctlError(f"{where}; the environment is not built, or this {engine} keeps them otherwise")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise RigctlError(f"{path} cannot be read: {error.strerror}; build the environment anew") from None


def _assigned(text: str, path: Path) -> dict[str, ast.expr]:
    """Names that a module or one of its classes assigns, and what."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in somebody else's strings
            nodes = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RigctlError(f"{path} cannot be parsed: {error}") from None
    nodes += [inner for node in nodes if isinstance(node, ast.ClassDef) for inner in node.body]
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
    return found


def _keys(name: str) -> Callable[[Path], Iterator[str]]:
    """Reads the keys of a dictionary, and of those that it takes in by `**`."""

    def reader(path: Path) -> Iterator[str]:
        known = _assigned(_text(path), path)
        wanted, seen = [name], set[str]()
        while wanted:
            part = known.get(one := wanted.pop())
            if one in seen or not isinstance(part, ast.Dict):
                continue
            seen.add(one)
            for key, value in zip(part.keys, part.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value
                elif key is None and isinstance(value, ast.Name):
                    wanted.append(value.id)

    return reader


def _literals(name: str) -> Callable[[Path], Iterator[str]]:
    """Reads the words of a Literal[...], and of those that it takes in."""

    def reader(path: Path) -> Iterator[str]:
        known = _assigned(_text(path), path)
        wanted: list[ast.expr] = [known[name]] if name in known else []
        while wanted:
            node = wanted.pop()
            if isinstance(node, ast.Subscript):
                wanted += node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.Name) and node.id in known:
                wanted.append(known.pop(node.id))

    return reader


def _entry_classes(folder: Path) -> Iterator[str]:
    """Classes that the modules of a package register (sglang/srt/models/registry.py)."""
    for path in folder.rglob("*.py"):
        for classes in re.findall(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", _text(path), re.MULTILINE):
            yield from re.findall(r"\w+", classes)


def _algorithms(path: Path) -> Iterator[str]:
    """Members of SpeculativeAlgorithm, and NEXTN, which server_args takes for EAGLE with the model's own head."""
    body = _text(path).partition("class SpeculativeAlgorithm(")[2].partition("    def ")[0]
    for name in re.findall(r"^    ([A-Z][A-Z0-9_]*) = auto\(\)$", body, re.MULTILINE):
        if name != "NONE":
            yield name
        if name == "EAGLE":
            yield "NEXTN"


READERS: dict[str, dict[str, tuple[str, Callable[[Path], Iterator[str]]]]] = {
    "vllm": {
        "architectures": ("vllm/model_executor/models/registry.py", _keys("_VLLM_MODELS")),
        "methods": ("vllm/config/speculative.py", _literals("SpeculativeMethod")),
        "tool_parsers": ("vllm/tool_parsers/__init__.py", _keys("_TOOL_PARSERS_TO_REGISTER")),
        "reasoning_parsers": ("vllm/reasoning/__init__.py", _keys("_REASONING_PARSERS_TO_REGISTER")),
    },
    "sglang": {
        "architectures": ("sglang/srt/models", _entry_classes),
        "methods": ("sglang/srt/speculative/spec_info.py", _algorithms),
        "tool_parsers": ("sglang/srt/function_call/function_call_parser.py", _keys("ToolCallParserEnum")),
        "reasoning_parsers": ("sglang/srt/parser/reasoning_parser.py", _keys("DetectorMap")),
    },
}
"""Where each engine keeps its names, below site-packages, and how they are read."""
