"""What an uninstall removes and keeps: the decisions, and the removal of paths on this machine's file system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyinfra.api.exceptions import PyinfraError

from rig.cli import uninstall
from rig.facts.created import Created, CreatedThings, PackagesRemovedWith
from rig.facts.state import Privilege, Rights
from rig.operations import removal as operations
from rig.plan import removal
from rigctl.whole_files import write_json
from tests.unit.test_operations import apply, state_directory

__all__ = ["state_directory"]


def test_a_directory_with_something_foreign_stays_and_so_do_its_parents() -> None:
    created = Created(
        recorded=True,
        there=(("directory", "/shared"), ("directory", "/shared/models"), ("tree", "/shared/models/tiny")),
        inside={"/shared": ["/shared/models"], "/shared/models": ["/shared/models/tiny", "/shared/models/theirs"]},
    )
    removed, kept = removal.directories(created)
    assert removed == []
    assert kept == {"/shared/models": ["/shared/models/theirs"], "/shared": ["/shared/models"]}
    alone = Created(True, created.there, {**created.inside, "/shared/models": ["/shared/models/tiny"]})
    assert removal.directories(alone) == (["/shared/models", "/shared"], {})


def test_what_a_killed_staging_left_goes_too() -> None:
    left = Created(True, (("tree", "/shared/tiny"), ("work", "/shared/.tiny.partial")))
    assert removal.trees(left) == ["/shared/.tiny.partial", "/shared/tiny"]


def test_units_are_told_from_other_files() -> None:
    paths = ["/etc/systemd/system/kimi-a.service", "/etc/systemd/system/kimi-b.timer", "/etc/sysusers.d/kimi-rig.conf"]
    created = Created(True, tuple(("file", path) for path in paths))
    assert removal.units(created) == ["kimi-a.service", "kimi-b.timer"]


def test_a_package_that_others_need_stays() -> None:
    with_it = {"": {"rsync", "libnuma1", "theirs"}, "rsync": {"rsync"}, "libnuma1": {"libnuma1", "theirs"}}
    assert removal.packages(["rsync", "libnuma1"], with_it) == (["rsync"], {"libnuma1": ["theirs"]})
    assert removal.packages(["rsync", "libnuma1"], {"": {"rsync", "libnuma1"}}) == (["libnuma1", "rsync"], {})


def test_apt_simulation_is_read() -> None:
    output = ["|rsync", "|theirs", "libnuma1|libnuma1", "libnuma1|theirs"]
    found = PackagesRemovedWith().process(output)
    assert found == {"": {"rsync", "theirs"}, "libnuma1": {"libnuma1", "theirs"}}


def test_a_host_without_a_record_has_nothing_of_ours() -> None:
    created = CreatedThings().process([])
    assert (created.recorded, removal.trees(created), removal.files(created)) == (False, [], [])


def test_paths_are_removed_and_what_is_foreign_is_untouched(
    tmp_path: Path, state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "OURS_WHOLE", ())
    theirs = tmp_path / "shared" / "theirs"
    ours = [
        tmp_path / "shared" / "tiny" / "config.json",
        tmp_path / "etc" / "file",
        tmp_path / "etc" / ".file.kimi-rig.Ab",
    ]
    for path in [theirs, *ours]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "link").symlink_to("/nowhere")
    before = theirs.stat()
    state_directory.mkdir()
    record = [f"tree {tmp_path}/shared/tiny", f"directory {tmp_path}/shared", f"directory {tmp_path}/etc"]
    record += [f"file {tmp_path}/etc/file", f"link {tmp_path}/link", f"file {tmp_path}/never made"]
    (state_directory / "created").write_text("\n".join(record))  # the last line torn by a kill
    assert apply(operations.paths_removed)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["run", "run/at-work.lock", "shared", "shared/theirs", "state", "state/created"]
    assert theirs.stat() == before
    assert not apply(operations.paths_removed)


def test_a_checkpoint_that_came_after_a_failed_staging_is_the_operators(tmp_path: Path, state_directory: Path) -> None:
    models = tmp_path / "real"
    (tmp_path / "models").symlink_to(models)
    for name in ("theirs", "staged", "never proved"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").write_text("{}")
    state_directory.mkdir()
    names = ("theirs", "staged", "never proved")
    (state_directory / "created").write_text("".join(f"tree {tmp_path}/models/{name}\n" for name in names))
    for name, origin in (("theirs", "adopted"), ("staged", "staged")):
        record = {"name": name, "path": str(models / name), "origin": origin, "manifest": {"files": [{"path": "a"}]}}
        write_json(state_directory / "checkpoints" / f"{name}.json", record)
    assert apply(operations.paths_removed)
    assert [path.name for path in models.iterdir()] == ["theirs"]
    assert not apply(operations.paths_removed)
    assert json.loads((models / "theirs" / "config.json").read_text()) == {}


@pytest.mark.parametrize("indent", [None, 4])
def test_a_record_is_read_however_its_json_is_laid_out(
    tmp_path: Path, state_directory: Path, indent: int | None
) -> None:
    (state_directory / "checkpoints").mkdir(parents=True)
    (state_directory / "created").write_text(f"tree {tmp_path}/plain\n")
    (tmp_path / "plain").mkdir()
    record = {"path": f"{tmp_path}/plain", "origin": "adopted", "manifest": {"files": [{"path": 'a "b" \\n | c'}]}}
    (state_directory / "checkpoints" / "plain.json").write_text(json.dumps(record, indent=indent))
    apply(operations.paths_removed)
    assert (tmp_path / "plain").is_dir()


@pytest.mark.parametrize("text", ["", "{", '{"origin": "adopted"}', "[]", '{"origin": "adopted", "path": 1}'])
def test_nothing_is_removed_while_a_record_does_not_say_whose_its_checkpoint_is(
    tmp_path: Path, state_directory: Path, text: str
) -> None:
    (tmp_path / "unknown").mkdir()
    (state_directory / "checkpoints").mkdir(parents=True)
    (state_directory / "created").write_text(f"tree {tmp_path}/unknown\n")
    record = state_directory / "checkpoints" / "unknown.json"
    record.write_text(text)
    with pytest.raises(PyinfraError):
        apply(operations.paths_removed)
    assert (tmp_path / "unknown").is_dir()
    record.unlink()
    assert apply(operations.paths_removed)
    assert not (tmp_path / "unknown").exists()


@pytest.mark.parametrize(
    ("output", "rights"),
    [
        (["user ubuntu", "root 0"], Rights("ubuntu", True)),
        (["user ubuntu", "root 1000"], Rights("ubuntu", False)),
        (["user ubuntu", "root sudo: a password is required"], Rights("ubuntu", False, "a password is required")),
    ],
)
def test_rights_of_the_login(output: list[str], rights: Rights) -> None:
    assert Privilege().process(output) == rights


def test_an_answer_that_ends_is_no_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ends)
    assert not uninstall.agreed()
