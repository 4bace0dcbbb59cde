"""A full disk: state files are whole or as they were, and the message says where and how much is needed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigctl.guarded import Place
from rigctl.supervisor.ended import note
from rigctl.whole_files import write_json
from tests.unit.serving import Run, limits


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one small file."""
    path = tmp_path / "state"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: it takes root")
    (path / "accepted.json").write_text('{"at": 1}')
    (path / "filler").write_bytes(bytes(4096))
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_file_is_whole_or_as_it_was(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full / "accepted.json"
    with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed; make room") as failed:
        write_json(path, {"at": 2, "more": "x" * 5000})
    assert failed.value.filename == str(path)
    assert json.loads(path.read_text()) == {"at": 1}
    assert sorted(one.name for one in full.iterdir()) == ["accepted.json", "filler"]
    note(Place(str(full)), path.name, {"at": 2, "more": "x" * 5000})
    said = capsys.readouterr().out
    assert said.startswith(f"not written down: {path}: No space left on device: ") and "bytes are needed" in said


@pytest.mark.slow
def test_an_engine_serves_on_where_its_acceptance_cannot_be_written_down(full: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, limits=limits(watch_seconds=0.2))
    run.until("READY=1")
    run.until("serving; answered")
    assert run.stop() == 0
    assert f"not written down: {full}/accepted.json: No space left on device" in run.journal
    assert "Traceback" not in run.journal
    assert json.loads((full / "accepted.json").read_text()) == {"at": 1}
