"""The reference pages say what the code says, and are compared with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rig.__main__ import VERBS
from rig.__main__ import main as kimi_rig
from rig.catalog.entries import ROOT
from rig.maintain import references, schemas


def test_every_key_and_every_verb_has_its_place() -> None:
    keys, commands = references.keys_page(), references.commands_page()
    for file, model in references.CATALOGUES.items():
        section = keys.partition(f"## {file}\n")[2].partition("\n## ")[0]
        assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == [*model.model_fields]
    assert "| `steps` | whole number from 1 to 16 | `3` | Tokens drafted before each verification pass" in keys
    assert "| `release` | text | required | An entry of releases.yaml. |" in keys
    assert all(f"### kimi-rig {verb}\n" in commands for verbs in VERBS.values() for verb in verbs)
    assert "### kimi-rig bench diagnose\n" in commands and "| `rigctl switch NAME [--warm]` | start a" in commands


def test_a_page_that_differs_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("schemas", "reference"):
        shutil.copytree(ROOT / "docs" / name, tmp_path / "docs" / name)
    monkeypatch.setattr(schemas, "ROOT", tmp_path)
    monkeypatch.setattr(schemas, "DOCS", tmp_path / "docs")
    page, order = tmp_path / "docs/reference/keys.md", tmp_path / "docs/schemas/Gone.json"
    page.write_text(page.read_text().replace("required", "optional"))
    order.write_text("{}")
    assert kimi_rig(["references", "--check"]) == 1
    assert capsys.readouterr().out.count("`make schemas` writes it") == 2 and order.exists()
    assert kimi_rig(["references"]) == 0
    assert not order.exists() and page.read_bytes() == (ROOT / "docs/reference/keys.md").read_bytes()
    assert kimi_rig(["references", "--check"]) == 0
