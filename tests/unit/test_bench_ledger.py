"""The ledger: whole files, never changed, never half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rig.bench import ledger
from tests.unit.bench_results import made_result


def test_round_trip(tmp_path: Path) -> None:
    result = made_result("vllm-base", 4, [100, 101], length=2.5)
    path = ledger.append(result, tmp_path)
    assert ledger.read(tmp_path) == [result]
    assert ledger.append(result, tmp_path) == path  # the same once more is no change
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == ["vllm-base-0-4.json"]


def test_never_overwritten(tmp_path: Path) -> None:
    ledger.append(made_result("vllm-base", 4, [100]), tmp_path)
    with pytest.raises(ledger.LedgerError, match="append-only"):
        ledger.append(made_result("vllm-base", 4, [200]), tmp_path)


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ledger.LedgerError, match="No space left on device"):
        ledger.append(made_result("vllm-base", 4, [100]), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"surprise": 1}, "surprise"), ({"kind": "guessed"}, "kind"), ({"format": 2}, "format"), ({"id": "../x"}, "id")],
)
def test_wrong_entries_name_file_and_key(tmp_path: Path, change: dict[str, object], message: str) -> None:
    entry = made_result("vllm-base", 4, [100]).model_dump(mode="json") | change
    (tmp_path / "wrong.json").write_text(json.dumps(entry))
    with pytest.raises(ledger.LedgerError, match=rf"wrong\.json.*{message}"):
        ledger.read(tmp_path)


def test_one_id_once(tmp_path: Path) -> None:
    ledger.append(made_result("vllm-base", 4, [100]), tmp_path)
    copied = next(tmp_path.rglob("*.json"))
    (tmp_path / "copy.json").write_bytes(copied.read_bytes())
    with pytest.raises(ledger.LedgerError, match="used twice"):
        ledger.read(tmp_path)
