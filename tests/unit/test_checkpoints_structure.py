"""The structural check: each kind of broken checkpoint is named, from headers and names only."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import safetensors.numpy

from rigctl.checkpoints import headers, structure
from rigctl.cli import main
from tests.staging import synthetic

FIRST, SECOND = "model-00001-of-000003.safetensors", "model-00002-of-000003.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A whole checkpoint of three shards."""
    return synthetic.make(tmp_path / "m", 3, 4096)


def test_whole_checkpoint_has_no_fault(root: Path) -> None:
    result = structure.check(root, "target")
    assert not result.errors and not result.warnings and result.shards == 3 and result.tensors == 6


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    arrays = {"a": numpy.arange(6, dtype=numpy.int64).reshape(2, 3), "b": numpy.zeros(4, dtype=numpy.bool_)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    tensors = headers.read(tmp_path / "x.safetensors")
    assert tensors["a"].shape == (2, 3) and tensors["a"].dtype == "I64"
    assert headers.read_table(tensors["a"], "I64") == list(range(6))
    assert headers.read_table(tensors["b"], "BOOL") == [False] * 4


def truncate(root: Path) -> None:
    place = root / FIRST
    place.write_bytes(place.read_bytes()[:-1])


def cut_header(root: Path) -> None:
    place = root / FIRST
    place.write_bytes(place.read_bytes()[:20])


def append(root: Path) -> None:
    with (root / FIRST).open("ab") as handle:
        handle.write(b"x")


def empty(root: Path) -> None:
    (root / FIRST).write_bytes(b"")


def page(root: Path) -> None:
    (root / FIRST).write_bytes(b"<!doctype html><html>not found</html>")


def twin(root: Path) -> None:
    one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = b"{" + one + b"," + one + b"}"
    (root / FIRST).write_bytes(struct.pack("<Q", len(raw)) + raw + b"1")


def duplicate(root: Path) -> None:
    (root / SECOND).write_bytes((root / FIRST).read_bytes())


def misplaced(root: Path) -> None:
    place = root / structure.INDEX
    content = json.loads(place.read_text())
    content["weight_map"]["layers.1.a"] = SECOND
    place.write_text(json.dumps(content))


def without(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def bad_json(root: Path) -> None:
    (root / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, f"{FIRST}: truncated"),
        (cut_header, f"{FIRST}: header of"),
        (append, f"{FIRST}: longer than its tensors"),
        (empty, "too short for a safetensors header"),
        (page, "truncated or not safetensors"),
        (twin, "'a' twice"),
        (duplicate, f"tensor layers.1.a is in {FIRST} and in {SECOND}"),
        (misplaced, f"places layers.1.a in {SECOND}, it is in {FIRST}"),
        (without(SECOND), f"names {SECOND}, which does not exist"),
        (without(structure.INDEX), "3 shards, but model.safetensors.index.json is missing"),
        (without("tiktoken.model"), "no tokenizer file"),
        (without("tokenizer_config.json"), "tokenizer_config.json is missing"),
        (without("configuration_tiny.py"), "configuration_tiny.py is missing: config.json needs it"),
        (without("tool_declaration.py"), "tool_declaration.py is missing: tokenization_tiny.py needs it"),
        (without("config.json"), "config.json is missing"),
        (bad_json, "config.json cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_damage_is_named(root: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(root)
    assert says in "\n".join(structure.check(root, "target").errors)


def test_drafter_needs_no_tokenizer(root: Path) -> None:
    (root / "tiktoken.model").unlink()
    (root / "tokenizer_config.json").unlink()
    assert not structure.check(root, "drafter").errors


def test_command_fails_with_the_faults(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "structure", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 6
    truncate(root)
    assert main(["checkpoints", "structure", str(root)]) == 1
    assert "truncated" in capsys.readouterr().err
