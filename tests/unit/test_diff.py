"""`make diff`: an edit of inventory/ against a commit, on a dirty tree, with no host."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rig.__main__ import main as kimi_rig
from tests.support.plans import INVENTORY

pytestmark = pytest.mark.slow


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory in a repository of its own, committed."""
    directory = tmp_path / "inventory"
    shutil.copytree(INVENTORY, directory)
    hosts = 'gpu = [("one", {"configurations": ["vllm-base", "vllm-base-current", "sglang-base"]})]\n'
    (directory / "gpu.py").write_text(hosts)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "before")
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(directory))
    return directory


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, "this case tests nothing any more"
    file.write_text(text.replace(old, new))


def differences(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert kimi_rig(["diff", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_flags_units_and_findings(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(inventory / "serving.yaml", "context_length: 32768", "context_length: 262144")
    lines = differences(capsys)
    assert lines[0] == "entries:" and "    + context_length: 262144" in lines
    at = lines.index("host one:")
    assert lines[at + 1 : at + 4] == [
        "  kimi-vllm-base.service, kimi-vllm-base-current.service",
        "    - --max-model-len 32768",
        "    + --max-model-len 262144",
    ], "one change of two units is shown once"
    at = lines.index("host one, findings:")
    assert lines[at + 1].startswith("    + warning: vllm-base may not fit")
    git(inventory, "commit", "-qam", "after")
    assert differences(capsys) == ["nothing differs from HEAD"]
    assert "    - context_length: 32768" in differences(capsys, "--ref", "HEAD~1")


def test_what_is_new_and_what_is_gone(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(inventory / "serving.yaml", "vllm-base-current:", "other:\n  extends: sglang-base\n\nvllm-base-current:")
    edit(inventory / "gpu.py", '"vllm-base-current"', '"other"')
    (inventory / "gpu.py").write_text((inventory / "gpu.py").read_text() + 'gpu.append(("two", {}))\n')
    lines = differences(capsys)
    for name, change in (
        ("  serving.other", "    new"),
        ("  kimi-vllm-base-current.service, vllm-base-current.json", "    gone"),
        ("  kimi-other.service", "    new"),
    ):
        assert lines[lines.index(name) + 1] == change, lines
    assert "    --tp-size 8" in lines, "flags of a new unit"
    assert "    + Conflicts=kimi-other.service" in lines and "    - Conflicts=kimi-vllm-base-current.service" in lines
    at = lines.index("host two:")
    assert "kimi-other.service" in lines[at + 1] and lines[at + 2] == "    new"


def test_an_overlay_is_told_where_it_differs(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(inventory / "overlays/sandbox.yaml", "max_running_requests: 8", "max_running_requests: 4")
    lines = differences(capsys)
    assert lines[0] == "entries under sandbox.yaml:" and len(lines) == 4
    assert lines[2:] == ["    - max_running_requests: 8", "    + max_running_requests: 4"]
    assert "serving.vllm-base," in lines[1] and "sglang" not in lines[1]


def test_a_wrong_edit_is_named_and_a_wrong_commit_is_no_obstacle(
    inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(inventory / "serving.yaml", "tensor_parallel: 8", "tensor_paralel: 8")
    assert (
        kimi_rig(
            [
                "diff",
            ]
        )
        == 1
    )
    assert "inventory/serving.yaml:12: serving.vllm-base.tensor_paralel" in capsys.readouterr().err
    git(inventory, "commit", "-qam", "wrong")
    edit(inventory / "serving.yaml", "tensor_paralel: 8", "tensor_parallel: 8")
    lines = differences(capsys)
    assert lines[0].startswith("HEAD: entries: not compared: inventory/serving.yaml:12: serving.vllm-base.")


def test_a_commit_that_is_not_there(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kimi_rig(["diff", "--ref", "nosuch"]) == 1
    assert "as of nosuch could not be read: fatal: not a valid object name" in capsys.readouterr().err


def test_an_edit_that_takes_a_pin_away(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory / "checkpoints.yaml"
    path.write_text(re.sub("(?m)^ *revision: .*\n", "", path.read_text(), count=1))
    lines = differences(capsys)
    at = lines.index("host one, findings:")
    assert lines[at + 1].startswith("    + warning: checkpoint kimi-k2.5-int4 has no pinned revision"), lines
