"""Every way by which a checkpoint becomes a recorded one, and what lies beside its proved weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rigctl.checkpoints import overlay, precheck, structure, verify
from rigctl.checkpoints.http import Refused
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.record import State
from rigctl.checkpoints.staging import Job, summary
from rigctl.cli import main
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import Manifest
from rigctl.errors import RigctlError
from tests.staging import synthetic
from tests.unit.test_checkpoints_fit import write_tensors
from tests.unit.test_checkpoints_precheck import of

INDEX = structure.INDEX
WEIGHT: dict[str, tuple[str, tuple[int, ...]]] = {"w": ("BF16", (2, 2))}
READ_BY_AN_ENGINE = [
    "z-old.safetensors",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "model.pt",
    "model.pth",
    "q4.gguf",
    "other.safetensors.index.json",
]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a whole target of three shards in `m`, and a state directory."""
    synthetic.make(tmp_path / "m", 3, 4096)
    monkeypatch.setenv("RIGCTL_CHECKPOINTS", str(tmp_path / "state"))
    return tmp_path


def job(host: Path, place: str = "m", kind: str = "directory", **keys: Any) -> Job:
    source = {"kind": kind, **({"path": str(host / "m")} if kind == "local" else {})}
    order = {"format": 1, "name": "x", "destination": str(host / place), "source": source, **keys}
    return Job(CheckpointJob.parse(order, "test"), State(host / "state"), Progress("x"), threading.Event())


# -- weights beside the proved ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ_BY_AN_ENGINE)
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no-index"])
def test_extra_weights_are_a_fault_everywhere(
    host: Path, name: str, indexed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if not indexed:
        for shard in sorted((host / "m").glob("*.safetensors"))[1:]:
            shard.unlink()
        (host / "m" / INDEX).unlink()
    assert job(host).stage().state == "adopted"
    manifest = job(host).stage().record.manifest
    (host / "m" / name).write_bytes(b"weights")
    for found in (verify.quick(host / "m", manifest, None), verify.full(host / "m", manifest)):
        assert not found.complete and found.extra == [name] and not found.damaged
    for full in ([], ["--full"]):
        assert main(["checkpoints", "verify", "x", *full]) == 1
        out, err = capsys.readouterr()
        assert f"extra weights: {name}: an engine would load it" in out and "move it out of the directory" in err
    assert main(["checkpoints", "status", "x", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "damaged" and name in status["fault"] and "move it out" in status["fault"]
    with pytest.raises(RigctlError, match=f"{name}; move it out of the directory"):
        job(host).stage()
    with pytest.raises(RigctlError, match=f"{name}; move it out of the directory"):
        job(host).repair(in_place=True)
    (host / "m" / name).unlink()
    assert job(host).stage().state == "present"


def test_extra_weights_are_a_fault_at_the_start_of_a_unit(host: Path) -> None:
    (host / "m").rename(host / "target")
    order = job(host, "target").order.model_copy(update={"name": "target"})
    Job(order, State(host / "state"), Progress("x"), threading.Event()).stage()
    used = of(host, drafter="drafter").model_copy(update={"drafter_path": None})
    assert "target: " in precheck.published(used)
    (host / "target" / "z-old.safetensors").write_bytes(b"weights")
    with pytest.raises(RigctlError, match=r"extra weights: z-old.safetensors: .* move it out"):
        precheck.published(used)


@pytest.mark.parametrize("name", ["notes.txt", "training_state.pt", "optimizer.bin", ".hidden.safetensors", "sub/x.pt"])
def test_what_no_engine_loads_is_no_fault(host: Path, name: str) -> None:
    record = job(host).stage().record
    (host / "m" / "sub").mkdir()
    (host / "m" / name).write_bytes(b"x")
    assert verify.quick(host / "m", record.manifest, record.seen).complete
    assert verify.foreign_files(host / "m", record.manifest) == [name]


def test_extra_weights_are_not_adopted_with_the_proved_ones(host: Path) -> None:
    made, _ = verify.manifest_of(host / "m", "test")
    (host / "manifest.json").write_text(json.dumps(made.document()))
    (host / "m" / "z-old.safetensors").write_bytes(b"weights")
    with pytest.raises(RigctlError, match=r"z-old\.safetensors; move it out"):
        job(host, manifest=str(host / "manifest.json")).adopt()
    assert State(host / "state").load("x") is None


def test_a_file_beside_the_links_of_an_overlay_is_a_fault(tmp_path: Path) -> None:
    drafter, place = tmp_path / "d", tmp_path / "overlay"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    write_tensors(drafter / "model.safetensors", WEIGHT)
    overlay.write(drafter, place, {"a": 1})
    assert overlay.source(place) == drafter
    (place / "z-old.safetensors").write_bytes(b"x")
    assert not overlay.is_current(drafter, place, {"a": 1})
    with pytest.raises(RigctlError, match=r"does not hold what was made from .*deploy again"):
        overlay.source(place)
    assert overlay.write(drafter, place, {"a": 1}) and overlay.source(place) == drafter
    (place / overlay.MARK).write_text("[]")
    with pytest.raises(RigctlError, match="not a mark of ours"):
        overlay.source(place)


@given(st.lists(st.sampled_from([*READ_BY_AN_ENGINE, "a.txt", "scheduler.pt", "Z.SAFETENSORS"]), unique=True))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_lies_beside_is_named_or_harmless(tmp_path: Path, names: list[str]) -> None:
    root = tmp_path / "m"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    write_tensors(root / "model.safetensors", WEIGHT)
    made, seen = verify.manifest_of(root, "test")
    for name in names:
        (root / name).write_bytes(b"x")
    assert set(verify.quick(root, made, seen).extra) == set(names) & set(READ_BY_AN_ENGINE)


# -- structure on every way in ------------------------------------------------------------------------------------


def cut(root: Path) -> str:
    shard = sorted(root.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1000)
    return "truncated"


def missing_shard(root: Path) -> str:
    sorted(root.glob("*.safetensors"))[1].unlink()
    return "does not exist"


def twins(root: Path) -> str:
    one, *_, last = sorted(root.glob("*.safetensors"))
    shutil.copy(one, last)
    return "and in"


def empty_map(root: Path) -> str:
    (root / INDEX).write_text('{"weight_map": {}}')
    return "weight_map"


def unlisted_shard(root: Path) -> str:
    write_tensors(root / "z.safetensors", {"other": ("BF16", (2, 2))})
    return "z.safetensors is not in"


def odd_index(root: Path) -> str:
    (root / INDEX).write_text('{"weight_map": {"a": 1, "b": ["x"]}}')
    return "weight_map"


def no_tokenizer(root: Path) -> str:
    (root / "tokenizer_config.json").unlink()
    return "tokenizer_config.json is missing"


DAMAGES = [cut, missing_shard, twins, empty_map, unlisted_shard, odd_index, no_tokenizer]


def against_its_manifest(host: Path) -> Job:
    made, _ = verify.manifest_of(host / "m", "test")
    (host / "manifest.json").write_text(json.dumps(made.document()))
    return job(host, kind="local", manifest=str(host / "manifest.json"))


WAYS: dict[str, Callable[[Path], Any]] = {
    "directory": lambda host: job(host).stage(),
    "adopt": lambda host: job(host).adopt(),
    "its own source": lambda host: job(host, kind="local").stage(),
    "against a manifest": lambda host: against_its_manifest(host).adopt(),
    "copied": lambda host: job(host, "copy", "local").stage(),
    "not recorded, repaired": lambda host: against_its_manifest(host).repair(in_place=True),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_checkpoint_comes_in_by_no_way(host: Path, way: str, damage: Callable[[Path], str]) -> None:
    says = damage(host / "m")
    with pytest.raises(RigctlError, match=says):
        WAYS[way](host)
    assert State(host / "state").load("x") is None


# -- recorded elsewhere -------------------------------------------------------------------------------------------


def test_a_destination_that_changes_and_back_is_proved_where_it_lies(host: Path) -> None:
    assert job(host, "copy", "local").stage().state == "staged"
    moved = job(host, "other/copy", "local")
    (host / "other").mkdir()
    assert moved.stage().state == "staged"
    back = job(host, "copy", "local")
    assert back.stage().state == "adopted" and (host / "other" / "copy").is_dir()
    assert State(host / "state").require("x").path == str(host / "copy")
    assert job(host, "copy", "local").stage().state == "present"


def test_a_generated_checkpoint_that_is_there_is_compared_with_a_new_one(host: Path) -> None:
    def generated(place: str) -> Job:
        source = {"kind": "generator", "generator": "drafter-half"}
        order = {"format": 1, "name": "x", "role": "drafter", "destination": str(host / place), "source": source}
        parsed = CheckpointJob.parse({**order, "generator_revision": "1", "replace": True, "reserve_bytes": 0}, "test")
        return Job(parsed, State(host / "state"), Progress("x"), threading.Event())

    assert generated("one").stage().state == "staged" and generated("two").stage().state == "staged"
    assert generated("one").stage().state == "adopted" and not list(host.glob(".one.partial"))
    (host / "two" / "config.json").chmod(0o644)
    (host / "two" / "config.json").write_text("{}")
    with pytest.raises(RigctlError, match="is not the whole checkpoint"):
        generated("two").stage()


# -- a full disk, a refused token, words --------------------------------------------------------------------------


def test_a_full_disk_names_the_path_and_leaves_the_old_record(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job(host).stage()
    record = host / "state" / "x.json"
    before = record.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(record))

    (host / "order.json").write_text(job(host).order.text())
    monkeypatch.setattr(os, "fsync", full)
    commands = (["verify", "x", "--full"], ["adopt", "x", "--spec", str(host / "order.json")])
    for command in commands:
        assert main(["checkpoints", *command]) == 1
        said = capsys.readouterr().err
        assert "No space left on device" in said and str(record) in said
    assert record.read_bytes() == before and [one.name for one in record.parent.glob(".*")] == []


def test_a_refused_token_is_the_first_word_of_many_faults(tmp_path: Path) -> None:
    faults = [Refused(f"{name}: the hub answers 401: the token is wrong: give another") for name in "abc"]
    said = str(summary([RigctlError("d: something else"), *faults], tmp_path))
    assert said.startswith("a: the hub answers 401: the token is wrong") and "\n" not in said


def test_the_last_line_of_an_adoption_counts_against_its_size(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host / "order.json").write_text(job(host).order.text())
    assert main(["checkpoints", "adopt", "x", "--spec", str(host / "order.json")]) == 0
    said = capsys.readouterr().err
    assert "of 0 B" not in said and "(100.0 %)" in said
    assert isinstance(State(host / "state").require("x").manifest, Manifest)
