"""rigctl on a host: what is in it, and that a changed file of it is noticed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from rig.operations.hostkit import (
    CONTENT,
    SOURCE,
    content_digest,
    hostkit_archive,
    hostkit_files,
    hostkit_path,
    installed,
)
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout
from rigctl.contract.sources import DirectorySource
from tests.unit.test_engines_and_units import box_plan
from tests.unit.test_operations import apply


def without_generator() -> HostPlan:
    """A host whose checkpoints lie there already."""
    plan, source = box_plan(), DirectorySource(kind="directory")
    found = {name: entry.model_copy(update={"source": source}) for name, entry in plan.checkpoints.items()}
    return replace(plan, checkpoints=found)


def unpack(plan: HostPlan, directory: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(hostkit_archive(hostkit_files(plan)))) as tar:
        tar.extractall(directory, filter="fully_trusted")


@pytest.fixture(params=[box_plan, without_generator])
def plan(request: pytest.FixtureRequest) -> HostPlan:
    found: HostPlan = request.param()
    return found


@pytest.fixture
def unpacked(plan: HostPlan, tmp_path: Path) -> Path:
    """As the deploy leaves it: also what the installation adds."""
    unpack(plan, tmp_path)
    (tmp_path / "complete").touch()
    (tmp_path / "rigctl" / "__pycache__").mkdir()
    (tmp_path / "rigctl" / "__pycache__" / "cli.cpython-311.pyc").touch()
    (tmp_path / "venv").symlink_to("/usr")
    return tmp_path


def found(directory: Path) -> str:
    return subprocess.run(
        ["sh", "-c", CONTENT], cwd=directory, capture_output=True, text=True, check=True
    ).stdout.strip()


def rigctl(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from rigctl.cli import main; sys.exit(main())", *arguments],
        env={**os.environ, "PYTHONPATH": str(directory)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_generator_lies_only_where_a_checkpoint_is_generated(tmp_path: Path) -> None:
    """Every other file is the same; rigctl offers `tiny-model` only where it can do it."""
    given, without = hostkit_files(box_plan()), hostkit_files(without_generator())
    generator = SOURCE / "rigctl" / "tiny_models"
    assert {path.parent for path in {*given} - {*without}} == {generator, generator / "cpu"}
    assert {*without} < {*given}
    assert hostkit_path(box_plan()) != hostkit_path(without_generator())
    unpack(without_generator(), tmp_path)
    assert "tiny-model" not in rigctl(tmp_path, "--help").stdout
    assert rigctl(tmp_path, "tiny-model", "target", "x").returncode == 2
    unpack(box_plan(), tmp_path)
    assert "tiny-model" in rigctl(tmp_path, "--help").stdout


def test_what_is_installed_is_recognised(plan: HostPlan, unpacked: Path) -> None:
    assert found(unpacked) == content_digest(hostkit_files(plan))


def test_every_change_is_noticed(plan: HostPlan, unpacked: Path) -> None:
    whole_digest = content_digest(hostkit_files(plan))
    cli, program = unpacked / "rigctl" / "cli.py", unpacked / "bin" / "rigctl"
    whole = cli.read_text()
    cli.write_text(whole + "# mine\n")
    assert found(unpacked) != whole_digest
    cli.write_text(whole)
    program.chmod(0o777)
    assert found(unpacked) != whole_digest
    program.chmod(0o755)
    (unpacked / "rigctl" / "more.py").touch()
    assert found(unpacked) != whole_digest
    (unpacked / "rigctl" / "more.py").unlink()
    assert found(unpacked) == whole_digest
    cli.unlink()
    assert found(unpacked) != whole_digest


def test_a_version_stays_while_a_process_runs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions before stay for a rollback. A service that no deploy has restarted may run from an older one."""
    for name in ("HOSTKIT", "STATE", "RUNTIME"):
        monkeypatch.setattr(layout, name, str(tmp_path / name.lower()))
    monkeypatch.setattr(layout, "AT_WORK", str(tmp_path / "runtime" / "at-work.lock"))
    hostkit, plan = tmp_path / "hostkit", box_plan()
    present = Path(hostkit_path(plan))
    unpack(plan, present)
    (present / "complete").touch()
    older = [f"{number:012x}" for number in range(4)]
    for number, version in enumerate(older):
        (hostkit / f"venv-{version}").mkdir(parents=True)
        (hostkit / version).mkdir()
        (hostkit / version / "venv").symlink_to(f"../venv-{version}")
        os.utime(hostkit / version, (number, number))
    program = f"import time; time.sleep(60)  # {hostkit / older[0]}"
    with subprocess.Popen([sys.executable, "-c", program]) as running:
        assert apply(installed, plan=plan)
        running.kill()
    assert not apply(installed, plan=plan)
    found = {path.name for path in hostkit.iterdir()}
    kept = [older[0], *older[2:]]
    assert found == {"current", present.name, *kept, *(f"venv-{version}" for version in kept)}
