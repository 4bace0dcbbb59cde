"""What nvidia-smi says when it fails is no answer: its words stand on standard output."""

from pathlib import Path

import pytest

from rigctl.nvidia_smi import nvidia_smi


def test_a_failure_has_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nvidia_smi("--query-gpu=index,memory.used") == []
    program.write_text("#!/bin/sh\necho '0, 1024'\n")
    assert nvidia_smi("--query-gpu=index,memory.used") == [["0", "1024"]]
