"""Adding a release: what is written and compared; nothing stays when it fails. The engine itself is stood in for."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rig.__main__ import main as kimi_rig
from rig.catalog import entries
from rig.cli.arguments import FAILED, USAGE
from rig.maintain import locks, pin, release_add
from rig.maintain.locks import LockError, Recipe
from rig.maintain.release_add import Facts, differences, needs_of, newest
from rigctl.engines import probes
from tests.support.plans import INVENTORY, SHIPPED

LOCK = "vllm==0.99.0 \\\n    --hash=sha256:00\nnvidia-cuda-runtime==13.0.48 \\\n    --hash=sha256:00\n"
OLD = Facts(
    {"--a": "1", "--b": "None", "--gone": "2", "--where": "<object at 0x7f>"},
    ["vllm:old", "vllm:both"],
    {"methods": ["mtp"], "tool_parsers": ["a", "b"]},
)
NEW = Facts(
    {"--a": "1", "--b": "'x'", "--new": "0", "--where": "<object at 0x81>"},
    ["vllm:both", "vllm:new"],
    {"methods": ["mtp", "dflash"], "tool_parsers": ["a"]},
)


def test_what_changed_between_two_releases() -> None:
    assert differences(OLD, NEW) == [
        "flag gone: --gone",
        "flag new: --new (default 0)",
        "default changed: --b: None -> 'x'",
        "metric gone: vllm:old",
        "metric new: vllm:new",
        "methods new: dflash",
        "tool parsers gone: b",
    ]
    assert differences(NEW, NEW) == []
    whole = [f"Config(x=1, same={'z' * 200}, y={value})" for value in (2, 3)]
    assert differences(Facts({"-c": whole[0]}, []), Facts({"-c": whole[1]}, [])) == [
        "default changed: -c: y=2) -> y=3)"
    ]
    assert "--where" not in json.loads(NEW.text())["options"], "an address differs in every process"


def test_the_newest_is_by_number() -> None:
    releases = entries.load_catalog().releases
    assert newest("vllm", releases) == "vllm-0.33.0"
    assert newest("sglang", releases) == "sglang-0.5.23"
    with pytest.raises(release_add.ReleaseError, match="no release of vlm to take after"):
        newest("vlm", releases)


def test_needs_come_from_the_lock() -> None:
    assert needs_of(LOCK, "x86_64-manylinux_2_34") == {
        "minimum_driver": "580",
        "minimum_cuda": "13.0",
        "minimum_glibc": "2.34",
    }
    twelve = needs_of("nvidia-cuda-runtime-cu12==12.8.90 \\\n", "linux")
    assert twelve == {"minimum_driver": "570", "minimum_cuda": "12.8"}
    assert needs_of("torch==2.13.0+cpu \\\n", "linux") == {}


def test_metrics_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/loggers.py").write_text('name="vllm:num_requests", other="vllm:", x = f"sglang:no"\n')
    assert probes.metric_names(tmp_path, "vllm") == ["vllm:num_requests"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of catalogues and recipes; a resolver and an engine that answer at once."""
    shutil.copytree(INVENTORY, tmp_path / "inventory")
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(tmp_path / "inventory"))
    (tmp_path / "locks").mkdir()
    shutil.copy(release_add.RECIPES, tmp_path / "locks")
    for name, value in {
        "ROOT": tmp_path,
        "LOCKS": tmp_path / "locks",
        "RECIPES": tmp_path / "locks/recipes.yaml",
        "FACTS": tmp_path / "facts",
    }.items():
        monkeypatch.setattr(release_add, name, value)

    def lock(recipe: Recipe) -> Path:
        target = tmp_path / "locks" / recipe.file_name
        target.write_text(LOCK)
        return target

    def ask(
        path: Path, engine: str, commands: Sequence[Sequence[str]] = (), features_: Sequence[str] = ()
    ) -> dict[str, Any]:
        verdicts = [{"argv": list(argv), "ok": "--speculative-config" not in argv, "detail": "no"} for argv in commands]
        names = ("eagle3_interface", "eagle3_admitted", "tool_parser", "reasoning_parser")
        features: Mapping[str, Any] = {name: {"ok": True, "detail": ""} for name in (*names, *features_)}
        facts = {"options": dict(NEW.options), "metrics": list(NEW.metrics), "registry": dict(NEW.registry)}
        return {**facts, "commands": verdicts, "features": features}

    monkeypatch.setattr(release_add, "read_recipes", lambda: locks.read_recipes(tmp_path / "locks/recipes.yaml"))
    monkeypatch.setattr(release_add, "write_lock", lock)
    monkeypatch.setattr(release_add, "installed", lambda *_: tmp_path)
    monkeypatch.setattr(release_add, "ask", ask)
    return tmp_path


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_release_is_written_and_compared(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "facts").mkdir()
    (repository / "facts/vllm-0.33.0.json").write_text(OLD.text())
    before = (repository / "inventory/releases.yaml").read_text()
    assert kimi_rig(["release-add", "vllm", "0.99.0"]) == FAILED
    output = capsys.readouterr().out
    assert "configuration vllm-base: accepted" in output
    assert "configuration vllm-eagle3-custom: REFUSED: no" in output
    assert "default changed: --b: None -> 'x'" in output and "metric new: vllm:new" in output
    assert "tool parsers gone: b" in output and "methods new: dflash" in output
    text = (repository / "inventory/releases.yaml").read_text()
    assert text.startswith(before), "comments and entries of others stay"
    release = entries.load_catalog(None, repository / "inventory").releases["vllm-0.99.0"]
    assert (release.version, release.minimum_driver, release.patches, release.drain) == ("0.99.0", "580", None, "flag")
    recipes = [one for one in locks.read_recipes(repository / "locks/recipes.yaml") if one.release == "vllm-0.99.0"]
    assert [one.packages for one in recipes] == [("vllm==0.99.0", "cuda-python>=13")] * 2
    assert {one.python for one in recipes} == {"3.11", "3.12"} == set(release.python)
    assert Facts.read("vllm-0.99.0", repository / "facts") is not None
    assert kimi_rig(["release-add", "vllm", "0.99.0"]) == 1
    assert "is in releases.yaml already" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["write_lock", "installed"])
def test_nothing_stays_when_it_fails(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    before = files(repository)

    def fails(*_: Any) -> None:
        raise LockError("not resolved")

    monkeypatch.setattr(release_add, step, fails)
    assert kimi_rig(["release-add", "vllm", "0.99.0"]) == 1
    assert "failed: not resolved" in capsys.readouterr().err
    assert files(repository) == before


def test_nothing_stays_when_it_is_ended(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(repository)
    monkeypatch.setattr(release_add, "installed", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert kimi_rig(["release-add", "vllm", "0.99.0"]) == 1
    assert files(repository) == before


@pytest.mark.parametrize("verb", ["release-add", "pin"])
def test_wrong_usage_is_no_result(verb: str) -> None:
    assert kimi_rig([verb]) == USAGE


@pytest.mark.parametrize(("version", "words"), [("newest", "is no version"), ("0.33.0", "in releases.yaml already")])
def test_wrong_versions(repository: Path, capsys: pytest.CaptureFixture[str], version: str, words: str) -> None:
    assert kimi_rig(["release-add", "vllm", version]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("release", list(entries.load_catalog(None, SHIPPED).releases))
def test_every_release_of_the_catalogue_is_recorded(release: str) -> None:
    facts = Facts.read(release)
    assert facts is not None, f"kimi-rig release-add --record {release}"
    assert len(facts.options) > 100 and len(facts.metrics) > 10


@pytest.mark.parametrize("command", [pin, release_add])
def test_a_file_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: ModuleType
) -> None:
    def fails(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/there")

    monkeypatch.setattr(command, command.__name__.rpartition(".")[2].removeprefix("release_"), fails)
    assert kimi_rig(["pin", "kimi-k2.5-int4"] if command is pin else ["release-add", "vllm", "1"]) == 1
    assert "failed: /there: Permission denied" in capsys.readouterr().err
