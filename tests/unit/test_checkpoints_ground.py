"""Staging and adoption where other users can write: what they exchange on the way changes nothing of root's."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.facts import remote_script
from rig.facts.report import carried
from rig.operations.removal import REMOVE_TREES
from rigctl import guarded
from rigctl import reached as reached_module
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.record import Record, State
from rigctl.checkpoints.sink import Sink
from rigctl.checkpoints.sources import Local
from rigctl.checkpoints.staging import Job, Outcome
from rigctl.checkpoints.verify import manifest_of
from rigctl.checkpoints.workplace import Workplace
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import File
from rigctl.errors import RigctlError
from rigctl.guarded import Unsafe
from rigctl.reached import content, reached
from tests.staging import synthetic
from tests.unit.test_guarded import ALICE, SECRET, lay, within

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to other users")


class Ground:
    """A host: a source, a state directory, root's own things, and a place for models that a test gives away."""

    def __init__(self, root: Path) -> None:
        root.chmod(0o755)
        self.root, self.source, self.state = root, root / "source", State(root / "state")
        self.models, self.precious = root / "data" / "models", root / "precious"
        self.models.mkdir(parents=True)
        synthetic.make(self.source, 3, 4096)
        (self.precious / "parts").mkdir(parents=True)
        (self.precious / "shadow").write_text(SECRET)
        (self.precious / "shadow").chmod(0o600)
        self.before = self.look()

    @property
    def destination(self) -> Path:
        return self.models / "m"

    @property
    def partial(self) -> Path:
        return self.models / ".m.partial"

    def look(self) -> dict[str, tuple[int, int, int]]:
        """Modes, owners and times of root's own things."""
        return {
            str(path): (path.stat().st_mode, path.stat().st_uid, path.stat().st_mtime_ns)
            for path in [self.precious, *self.precious.rglob("*")]
        }

    def job(self, **keys: Any) -> Job:
        source = {"kind": "local", "path": str(self.source)}
        order = {"format": 1, "name": "m", "destination": str(self.destination), "source": source, **keys}
        self.progress = Progress("m")
        return Job(CheckpointJob.parse(order, "test"), self.state, self.progress, threading.Event())

    def give(self, how: str) -> None:
        """Let another user write where models are kept."""
        match how:
            case "open to all":
                self.models.chmod(0o777)
            case "of another user":
                os.chown(self.models, ALICE, ALICE)
            case "below one of another user":
                os.chown(self.models.parent, ALICE, ALICE)


@pytest.fixture
def ground() -> Iterator[Ground]:
    with tempfile.TemporaryDirectory(prefix="ground-") as root:
        found = Ground(Path(root))
        yield found
        assert found.look() == found.before, "root's own things were touched"


WAYS = ["open to all", "of another user", "below one of another user"]


def whole(ground: Ground, place: Path) -> bool:
    return manifest_of(place, "x")[0].identity() == manifest_of(ground.source, "x")[0].identity()


def plant(ground: Ground, *, owner: int) -> None:
    """A workplace as the fault needs it: marked as ours, its directories links to root's."""
    ground.partial.mkdir()
    (ground.partial / "owner.json").write_text("{}")
    (ground.partial / "tree").symlink_to(ground.precious)
    (ground.partial / "parts").symlink_to(ground.precious / "parts")
    for path in (ground.partial, ground.partial / "owner.json"):
        os.chown(path, owner, owner)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("planted", ["directory", "link"])
def test_a_workplace_of_another_user_is_not_taken_over(ground: Ground, how: str, planted: str) -> None:
    ground.give(how)
    if planted == "link":
        ground.partial.symlink_to(ground.precious)
    else:
        plant(ground, owner=ALICE)
    with pytest.raises(RigctlError, match=r"\.m\.partial (exists and is not this program's|is led elsewhere)"):
        ground.job().stage()


def test_a_workplace_that_others_can_write_is_not_taken_over(ground: Ground) -> None:
    plant(ground, owner=0)
    ground.partial.chmod(0o777)
    with pytest.raises(RigctlError, match="not this program's"):
        ground.job().stage()


def test_a_record_that_another_user_wrote_is_not_believed(ground: Ground) -> None:
    ground.give("open to all")
    made, seen = manifest_of(ground.source, "x")
    shutil.copytree(ground.source, ground.destination)
    mode = stat.S_IMODE(ground.destination.stat().st_mode)
    plant(ground, owner=ALICE)
    (ground.partial / "tree").unlink()
    forged = Record("m", str(ground.destination), "staged", made, seen, 0.0, 0.0, read_only=True)
    (ground.partial / "record.json").write_text(json.dumps(forged.to_json()))
    outcome = ground.job().stage()
    assert outcome.state == "adopted" and stat.S_IMODE(ground.destination.stat().st_mode) == mode


@pytest.mark.parametrize("how", WAYS)
def test_it_is_staged_whole_and_the_cure_is_shown(ground: Ground, how: str) -> None:
    ground.give(how)
    job = ground.job(read_only=True)
    outcome = job.stage()
    assert outcome.state == "staged" and whole(ground, ground.destination) and not ground.partial.exists()
    assert stat.S_IMODE(ground.destination.stat().st_mode) == 0o555
    [said] = [event for event in ground.progress.events if "chmod go-w" in event]
    assert str(ground.models if "below" not in how else ground.models.parent) in said
    assert ground.job().stage().state == "present", "what is recorded is neither fetched again nor refused"
    (ground.destination / "config.json").unlink()
    assert ground.job().repair(in_place=False).state == "repaired" and whole(ground, ground.destination)
    assert stat.S_IMODE(ground.destination.stat().st_mode) == 0o555


def test_nothing_is_said_where_nobody_else_can_write(ground: Ground) -> None:
    ground.job().stage()
    assert not any("chmod" in event for event in ground.progress.events)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something once, after the first file has been fetched."""
    fetch, left = Local.fetch, [act]

    def fetched(self: Local, entry: File, sink: Sink) -> None:
        fetch(self, entry, sink)
        if left:
            left.pop()()

    monkeypatch.setattr(Local, "fetch", fetched)


def test_the_workplace_is_exchanged_while_it_is_filled(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    ground.give("of another user")

    def exchange() -> None:
        ground.partial.rename(ground.models / "moved")
        plant(ground, owner=ALICE)

    meanwhile(monkeypatch, exchange)
    ground.job(workers=1).stage()
    assert whole(ground, ground.destination)


def test_the_parent_is_exchanged_while_it_is_filled(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    ground.give("below one of another user")
    moved = ground.models.with_name("moved")

    def exchange() -> None:
        ground.models.rename(moved)
        ground.models.symlink_to(ground.precious)

    meanwhile(monkeypatch, exchange)
    ground.job(workers=1).stage()
    assert whole(ground, moved / "m") and not (ground.precious / "m").exists()


def test_a_link_in_place_of_the_destination_is_not_replaced(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    ground.give("of another user")
    meanwhile(monkeypatch, lambda: ground.destination.symlink_to(ground.precious))
    with pytest.raises(RigctlError, match="appeared while this job ran") as failed:
        ground.job(workers=1).stage()
    assert "/proc/" not in str(failed.value) and str(ground.partial) in str(failed.value)


def test_a_link_of_another_user_leads_where_that_user_can_write(ground: Ground) -> None:
    link = ground.root / "link"
    link.symlink_to(ground.precious)
    os.chown(link, ALICE, ALICE, follow_symlinks=False)
    with pytest.raises(RigctlError, match=f"{link} is a link that another user made.*chown -h root {link}"):
        ground.job(destination=str(link / "m")).stage()
    own = ground.root / "own"
    own.mkdir()
    os.chown(own, ALICE, ALICE)
    link.unlink()
    link.symlink_to(own)
    os.chown(link, ALICE, ALICE, follow_symlinks=False)
    assert ground.job(destination=str(link / "m")).stage().state == "staged" and whole(ground, own / "m")


def test_what_the_previous_version_began_goes_on(ground: Ground) -> None:
    """It made the workplace with mode 0700, also where others can write."""
    ground.give("open to all")
    made, _ = manifest_of(ground.source, "x")
    with Workplace(ground.destination) as place:
        place.begin(made)
        entry = made.by_path["config.json"]
        part = place.part(entry)
        part.write_bytes((ground.source / "config.json").read_bytes())
        place.accept(entry, part)
        journal = (ground.partial / "verified.jsonl").read_text()
    assert stat.S_IMODE(ground.partial.stat().st_mode) == 0o700
    job = ground.job()
    assert job.stage().state == "staged"
    assert ground.progress.fetched == made.total - entry.size and journal


ODD = ["pipe", "link", "second name", "dangling", "directory", "socket"]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["config.json", "extra.txt", "model-00001-of-00003.safetensors"])
def test_what_is_adopted_is_read_for_what_it_is(ground: Ground, kind: str, name: str) -> None:
    synthetic.make(ground.destination, 3, 4096)
    ground.give("of another user")
    os.chown(ground.destination, ALICE, ALICE)
    (ground.destination / name).unlink(missing_ok=True)
    lay(kind, ground.destination / name, ground.precious / "shadow")
    os.chown(ground.destination / name, ALICE, ALICE, follow_symlinks=False) if kind != "second name" else None
    with within(20):
        try:
            outcome: Outcome | None = ground.job(source={"kind": "directory"}).adopt()
        except (RigctlError, OSError) as error:
            outcome = None
            assert SECRET not in str(error)
    assert outcome is None or name not in outcome.record.manifest.by_path
    assert outcome is None or kind == "directory"


def test_links_of_a_hub_cache_are_followed(ground: Ground) -> None:
    """Files of a snapshot are links to blobs of the same user; others may read neither."""
    synthetic.make(ground.destination, 3, 4096)
    blobs = ground.models / "blobs"
    blobs.mkdir()
    for path in list(ground.destination.iterdir()):
        if path.is_file():
            path.rename(blobs / path.name).chmod(0o600)
            path.symlink_to(f"../blobs/{path.name}")
    ground.give("of another user")
    for path in [blobs, *blobs.iterdir(), ground.destination, *ground.destination.rglob("*")]:
        os.chown(path, ALICE, ALICE, follow_symlinks=False)
    assert ground.job(source={"kind": "directory"}).adopt().state == "adopted"


def test_a_repair_goes_into_no_directory_of_a_link(ground: Ground) -> None:
    (ground.source / "figures" / "shadow").write_text("a figure")
    shutil.copytree(ground.source, ground.destination)
    shutil.rmtree(ground.destination / "figures")
    (ground.destination / "figures").symlink_to(ground.precious)
    for path in (ground.models, ground.destination):
        os.chown(path, ALICE, ALICE)
    with pytest.raises((RigctlError, Unsafe)):
        ground.job().repair(in_place=True)


@pytest.mark.parametrize("path", ["/", "/usr/..", "/etc/hostname/", "//etc///hostname", "/var/run/../run/./lock"])
def test_a_path_is_walked_as_the_kernel_does(path: str) -> None:
    with reached(path) as way:
        assert os.path.realpath(path) == os.path.realpath(f"/proc/self/fd/{way.directory}/{way.name}")
        assert not way.links and not way.shared


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"), reached(tmp_path / "a" / "x"):
        pass


def test_a_long_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert content(tmp_path / "x", 5) == b"12345"
    with pytest.raises(Unsafe, match="longer than 4"):
        content(tmp_path / "x", 4)


def remove(*paths: Path) -> subprocess.CompletedProcess[str]:
    """What an uninstall runs on the host for directories that are ours with all in them."""
    program = carried(REMOVE_TREES, guarded, reached_module)
    command = ["python3", "-", *map(str, paths)]
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False, cwd="/")


def test_an_uninstall_removes_what_was_staged_and_follows_nobody(ground: Ground) -> None:
    ground.give("below one of another user")
    ground.job().stage()
    ground.partial.mkdir()
    (ground.destination / "away").symlink_to(ground.precious)
    assert remove(ground.destination, ground.partial, ground.models / "gone", ground.root / "no" / "x").returncode == 0
    assert [*ground.models.iterdir()] == []
    # The directory above is another user's, who puts a link in the way: root's own would go.
    ground.models.rmdir()
    ground.models.symlink_to(ground.root)
    os.chown(ground.models, ALICE, ALICE, follow_symlinks=False)
    done = remove(ground.models / "precious")
    assert done.returncode == 1 and f"chown -h root {ground.models}" in done.stderr
    assert (ground.precious / "shadow").exists()
    os.chown(ground.models, 0, 0, follow_symlinks=False)
    (ground.root / "m").mkdir()
    assert remove(ground.models / "m").returncode == 0 and not (ground.root / "m").exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "second name", "endless"])
def test_the_facts_of_a_host_hold_nothing_of_root(ground: Ground, kind: str) -> None:
    ground.give("of another user")
    lay(kind, ground.models / "config.json", ground.precious / "shadow")
    os.chown(ground.models / "config.json", ALICE, ALICE, follow_symlinks=False) if "link" in kind else None
    with within(5):
        assert remote_script.model(str(ground.models))["config"] is None
    assert str(ground.models / "config.json") in remote_script.unknown


def test_files_that_a_group_alone_may_read_are_read_where_they_lie(ground: Ground) -> None:
    """The version before this one adopted them, and the engine's user may be in that group."""
    shutil.copytree(ground.source, ground.destination)
    for path in ground.destination.rglob("*"):
        path.chmod(0o750 if path.is_dir() else 0o640)
    ground.give("of another user")
    assert ground.job(source={"kind": "directory"}).adopt().state == "adopted"


def test_root_may_be_another_user_on_a_network_file_system(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes there is that user's (root_squash), and is continued."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    meanwhile(monkeypatch, lambda: (_ for _ in ()).throw(RigctlError("the line is cut")))
    with pytest.raises(RigctlError, match="the line is cut"):
        ground.job(workers=1).stage()
    assert ground.partial.exists() and ground.job(read_only=True).stage().state == "staged"
    assert stat.S_IMODE(ground.destination.stat().st_mode) == 0o555
