"""rigctl on a host: a file of it that was changed is noticed."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from rig.operations.hostkit import CONTENT, content_digest, hostkit_archive


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """As the deploy leaves it: also what the installation adds."""
    with tarfile.open(fileobj=io.BytesIO(hostkit_archive())) as tar:
        tar.extractall(tmp_path, filter="fully_trusted")
    (tmp_path / "complete").touch()
    (tmp_path / "rigctl" / "__pycache__").mkdir()
    (tmp_path / "rigctl" / "__pycache__" / "cli.cpython-311.pyc").touch()
    (tmp_path / "venv").symlink_to("/usr")
    return tmp_path


def found(directory: Path) -> str:
    return subprocess.run(
        ["sh", "-c", CONTENT], cwd=directory, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_what_is_installed_is_recognised(unpacked: Path) -> None:
    assert found(unpacked) == content_digest()


def test_every_change_is_noticed(unpacked: Path) -> None:
    cli, program = unpacked / "rigctl" / "cli.py", unpacked / "bin" / "rigctl"
    whole = cli.read_text()
    cli.write_text(whole + "# mine\n")
    assert found(unpacked) != content_digest()
    cli.write_text(whole)
    program.chmod(0o777)
    assert found(unpacked) != content_digest()
    program.chmod(0o755)
    (unpacked / "rigctl" / "more.py").touch()
    assert found(unpacked) != content_digest()
    (unpacked / "rigctl" / "more.py").unlink()
    assert found(unpacked) == content_digest()
    cli.unlink()
    assert found(unpacked) != content_digest()
