"""Is a directory a loadable checkpoint? Seconds, from names, config files and safetensors headers only."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rigctl.checkpoints import headers
from rigctl.checkpoints.headers import BadFile
from rigctl.errors import RigctlError
from rigctl.reached import content
from rigctl.whole_files import read_json

INDEX = "model.safetensors.index.json"
CODE_BYTES = 4 << 20
"""More than any Python file of a checkpoint has."""
TOKENIZERS = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass
class Structure:
    """Faults (nothing may be started) and warnings, each naming its file."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tensors: int = 0
    shards: int = 0


def check(root: Path, kind: str) -> Structure:
    """Check a target or a drafter. A drafter needs no tokenizer, it uses the target's."""
    result = Structure()
    if not (root / "config.json").is_file():
        result.errors.append("config.json is missing")
    where = _check_shards(root, result)
    _check_index(root, result, where)
    _check_code(root, result)
    if kind == "target":
        _check_tokenizer(root, result)
    return result


def told(*found: tuple[object, str]) -> list[str]:
    """The texts of what holds."""
    return [text for holds, text in found if holds]


def _read(root: Path, name: str, result: Structure) -> dict[str, Any]:
    """A JSON object of the checkpoint; empty where there is none, or a fault."""
    if not (root / name).is_file():
        return {}
    try:
        content = read_json(root / name, "")
    except RigctlError as error:
        result.errors.append(str(error).strip())
        return {}
    if not isinstance(content, dict):
        result.errors.append(f"{name} is not a JSON object")
        return {}
    return content


def _check_shards(root: Path, result: Structure) -> dict[str, str]:
    """Read every header; tensor name -> file name."""
    where: dict[str, str] = {}
    shards = sorted(root.glob("*.safetensors"))
    result.shards = len(shards)
    if not shards:
        result.errors.append("no *.safetensors file")
    for shard in shards:
        try:
            tensors = headers.read(shard)
        except (BadFile, OSError) as error:
            result.errors.append(str(error))
            continue
        for name in tensors:
            if name in where:
                result.errors.append(f"tensor {name} is in {where[name]} and in {shard.name}")
            where[name] = shard.name
    result.tensors = len(where)
    return where


def _check_index(root: Path, result: Structure, where: dict[str, str]) -> None:
    shards = sorted(root.glob("*.safetensors"))
    if not (root / INDEX).is_file():
        if len(shards) > 1:
            result.errors.append(f"{len(shards)} shards, but {INDEX} is missing")
        return
    named = _read(root, INDEX, result).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        result.errors.append(f"{INDEX} has no weight_map that names a file for each tensor")
        return
    have = {shard.name for shard in shards}
    files, readable = set(named.values()), set(where.values())
    strays = [tensor for tensor, file in named.items() if file in readable and where.get(tensor) != file]
    result.errors += [
        *(f"{INDEX} names {name}, which does not exist" for name in sorted(files - have)),
        *(
            f"{name} is not in {INDEX}: engines differ in whether they load it; move it away"
            for name in sorted(have - files)
        ),
        *(f"{INDEX} places {one} in {named[one]}, it is in {where.get(one, 'no file')}" for one in strays[:10]),
    ]
    unnamed = sorted(set(where) - set(named))
    if unnamed:
        result.warnings.append(f"{len(unnamed)} tensors are not in {INDEX}, e.g. {unnamed[0]} in {where[unnamed[0]]}")


def _check_tokenizer(root: Path, result: Structure) -> None:
    there = [name for name in TOKENIZERS if (root / name).is_file()]
    result.errors += told(
        (not (root / "tokenizer_config.json").is_file(), "tokenizer_config.json is missing"),
        (not there, f"no tokenizer file ({', '.join(TOKENIZERS)})"),
    )
    defaults = "generation_config.json is missing: the engine's own sampling defaults apply"
    result.warnings += told((not (root / "generation_config.json").is_file(), defaults))


def _check_code(root: Path, result: Structure) -> None:
    """`trust_remote_code` files: those that `auto_map` names, and what these import beside them."""
    wanted: dict[str, str] = {}
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        for module in _auto_map(_read(root, name, result).get("auto_map")):
            wanted.setdefault(module, name)
    done: set[str] = set()
    while wanted.keys() - done:
        module = sorted(wanted.keys() - done)[0]
        done.add(module)
        place = root / f"{module.replace('.', '/')}.py"
        if not place.is_file():
            result.errors.append(f"{place.name} is missing: {wanted[module]} needs it (trust_remote_code)")
            continue
        for name in _local_imports(place, result):
            wanted.setdefault(name, place.name)


def _auto_map(content: Any) -> Iterator[str]:
    """Module names of an auto_map; values are `module.Class`, or lists of those (slow and fast tokenizer)."""
    values = list(content.values()) if isinstance(content, dict) else []
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and "--" not in item and "." in item:
                yield item.rpartition(".")[0]


def _local_imports(place: Path, result: Structure) -> Iterator[str]:
    """`from .x import y` and `from . import x` of a source file."""
    try:
        tree = ast.parse(content(place, CODE_BYTES))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:  # the last two: nested too deep
        result.errors.append(f"{place.name} is not Python: {error}")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                yield node.module
            else:
                yield from (alias.name for alias in node.names)
