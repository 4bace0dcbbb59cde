"""A compromised engine, and a local user, exchange what root reads, publishes and removes, again and again meanwhile.

Each try is a race of some seconds: root's work on one side, another user's processes on the other. Whatever root's work
ends in, root's own things are as they were, nothing of them is shown, and nothing hangs.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest

from rig.facts import remote_script
from rig.operations.remove_trees import remove_tree
from rigctl import lock_files
from rigctl.bench import profile
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.record import State
from rigctl.checkpoints.staging import Job
from rigctl.checkpoints.verify import manifest_of
from rigctl.cli import main
from rigctl.contract import happened, layout
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.reached import readable
from rigctl.services import doctor, leftovers, status
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.specification import named
from tests.staging import synthetic
from tests.unit.serving import fields

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runs as root against other users")

KIMI, ALICE = 12345, 12346
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
SECONDS = float(os.environ.get("BREAKER_SECONDS", "3"))


@contextmanager
def racing(uid: int, act: Callable[[], None]) -> Iterator[None]:
    """Another user does something over and over while the block runs."""
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives the test
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            while True:
                with suppress(OSError):
                    act()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"root's work hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def look(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """What must not change: mode, owner, time and content of root's own things."""
    return {
        str(path): (status.st_mode, status.st_uid, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *sorted(root.rglob("*"))]
        for status in [path.lstat()]
    }


class Host:
    """Root's own things, the directories of one unit, and a directory for models."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.chmod(0o755)
        self.root, self.precious = root, root / "precious"
        for name in ("parts", "tree", "figures", "deep"):
            (self.precious / name).mkdir(parents=True)
        for name in ("id_ed25519", "started.json", "x.json", "a.log", "parts/x", "figures/logo.svg", "config.json"):
            (self.precious / name).write_text(SECRET)
            (self.precious / name).chmod(0o600)
        for name in ("CONFIGURATIONS", "RUNTIME", "SERVING", "LOGS", "CACHE"):
            (root / name).mkdir()
            monkeypatch.setattr(layout, name, str(root / name))
        Path(layout.specification_path("a")).write_text(json.dumps(fields(name="a")))
        self.unit = named("a")
        for place in (self.unit.runtime, self.unit.state, self.unit.logs, self.unit.cache):
            Path(str(place)).mkdir()
            os.chown(str(place), KIMI, KIMI)
        self.models = root / "data" / "models"
        self.models.mkdir(parents=True)
        answers = {"ActiveState": "active"}
        monkeypatch.setattr(status, "properties", lambda _, wanted: {**dict.fromkeys(wanted, ""), **answers})
        monkeypatch.setattr(status, "identities", lambda _: {})
        monkeypatch.setattr(doctor, "COMMANDS", {})
        monkeypatch.setattr(doctor, "_output", lambda _: "")
        monkeypatch.setattr(Engine, "post", lambda *_, **__: None)
        monkeypatch.setattr(profile, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(profile, "WRITING_SECONDS", 0.05)
        self.before = look(self.precious)

    def exchanges(self, place: Place, name: str, good: str) -> Callable[[], None]:
        """Put one thing after the other where root looks for a file, each by one rename."""
        path, scratch = Path(str(place), name), Path(str(place), f".{name}.scratch")

        def act() -> None:
            for old in (scratch, path):
                if random.random() < 0.3:
                    with suppress(OSError):
                        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            match random.randrange(7):
                case 0:
                    scratch.write_text(good)
                case 1:
                    scratch.symlink_to(self.precious / "id_ed25519")
                case 2:
                    os.mkfifo(scratch)
                case 3:
                    scratch.mkdir()
                case 4:
                    os.link(self.precious / "id_ed25519", scratch)
                case 5:
                    with scratch.open("wb") as file:
                        file.truncate(1 << 40)
                case 6:
                    scratch.symlink_to(self.precious)
            scratch.rename(path)

        return act


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="breaker-") as root:
        found = Host(Path(root), monkeypatch)
        yield found
        assert look(found.precious) == found.before, "root's own things were touched"


def repeatedly(work: Callable[[], object], *, each: float = 20) -> int:
    """Do root's work until the time is over; how often. What it shows must hold no secret."""
    end, times = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        said = io.StringIO()
        with within(each), redirect_stdout(said), redirect_stderr(said):
            work()
        assert SECRET not in said.getvalue()
        times += 1
    return times


def test_records_are_exchanged_while_root_reads_them(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        remote_script, "RECORDS", {layout.RUNTIME: happened.Started.FILE, layout.SERVING: happened.Ended.FILE}
    )
    good = json.dumps({"digest": "d" * 64, "accepted_at": 1})
    with ExitStack() as race:
        race.enter_context(racing(KIMI, host.exchanges(host.unit.runtime, "started.json", good)))
        race.enter_context(racing(KIMI, host.exchanges(host.unit.runtime, "watch.json", "{}")))
        race.enter_context(racing(KIMI, host.exchanges(host.unit.state, "ended.json", "{}")))

        def work() -> None:
            assert main(["status"]) == main(["status", "--json"]) == 0
            remote_script.accepted()

        assert repeatedly(work) > 3


def test_logs_are_exchanged_while_root_packs_them(host: Host) -> None:
    archive = host.root / "bundle.tar.gz"
    with racing(KIMI, host.exchanges(host.unit.logs, "a.log", "a line\n")):

        def work() -> None:
            archive.unlink(missing_ok=True)
            assert main(["doctor", "--output", str(archive)]) == 0
            with tarfile.open(archive) as packed:
                for one in packed.getmembers():
                    assert SECRET.encode() not in (packed.extractfile(one) or io.BytesIO()).read()
            main(["logs", "a", "--run", "1"]) if Path(str(host.unit.logs), "a.log").is_file() else None

        assert repeatedly(work) > 1


def test_the_sweep_of_profiles_meets_links_at_every_level(host: Host) -> None:
    cache = Path(str(host.unit.cache))
    trace = json.dumps({"traceEvents": [{"cat": "kernel", "name": "x", "dur": 1}]})

    def act() -> None:
        for path in (cache / "profile", cache / "profile" / "deep", cache / "profile" / "x.json"):
            with suppress(OSError):
                path.unlink() if path.is_symlink() or path.is_file() else path.rename(cache / f"old{random.random()}")
            match random.randrange(3):
                case 0:
                    path.symlink_to(host.precious)
                case 1:
                    path.mkdir()
                case 2:
                    path.write_text(trace)

    with racing(KIMI, act), racing(KIMI, act):

        def work() -> None:
            with suppress(profile.ProfileFailed):
                profile.stop(Engine(host.unit))

        assert repeatedly(work) > 3


def test_a_very_deep_tree_ends_no_sweep(host: Host) -> None:
    at = os.open(str(host.unit.cache), os.O_RDONLY)
    for name in ["profile", *["d"] * 3000]:
        os.mkdir(name, dir_fd=at)
        at, before = os.open(name, os.O_RDONLY, dir_fd=at), at
        os.close(before)
    os.close(at)
    with within(20), pytest.raises(profile.ProfileFailed):
        profile.stop(Engine(host.unit))
    subprocess.run(["rm", "-rf", f"{host.unit.cache}/profile"], check=True)


def test_a_compressed_trace_does_not_fill_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "TRACE_BYTES", 8 << 20)
    directory = Path(str(host.unit.cache), "profile")
    directory.mkdir()
    with (directory / "x.json.gz").open("wb") as file:
        subprocess.run("head -c 256M /dev/zero | gzip -1", shell=True, stdout=file, check=True)
    (directory / "y.json").write_text('{"traceEvents": [' + "{}," * 1_000_000 + "{}]}")
    monkeypatch.setattr(profile, "EVENTS", 1000)
    with within(60), pytest.raises(profile.ProfileFailed):
        profile.stop(Engine(host.unit))
    assert not [*directory.iterdir()]


class Staging:
    """A staging of root's beside a user who can write where it grows."""

    def __init__(self, host: Host, *, above: bool) -> None:
        self.host, self.source = host, host.root / "source"
        synthetic.make(self.source, 3, 4096)
        self.identity = manifest_of(self.source, "x")[0].identity()
        os.chown(host.models, ALICE, ALICE)
        if above:
            os.chown(host.models.parent, ALICE, ALICE)

    def act(self) -> None:
        """What the user does: exchange the workplace, the destination or the directory that holds both."""
        models, precious = self.host.models, self.host.precious
        target = random.choice([models / ".m.partial", models / "m", models])
        with suppress(OSError):
            target.rename(target.with_name(f"old{random.random()}"))
        match random.randrange(4):
            case 0:
                target.symlink_to(precious)
            case 1:
                target.mkdir()
                (target / "owner.json").write_text("{}")
                (target / "tree").symlink_to(precious / "tree")
                (target / "parts").symlink_to(precious / "parts")
            case 2:
                target.mkdir()
            case 3:
                for old in target.parent.glob("old*"):
                    old.rename(target)
        time.sleep(random.random() / 50)

    def work(self) -> None:
        """One staging, or repair, that may fail; a checkpoint that is recorded is whole where it was published."""
        source = {"kind": "local", "path": str(self.source)}
        order = {"format": 1, "name": "m", "destination": str(self.host.models / "m"), "source": source}
        order |= {"reserve_bytes": 0, "reserve_inodes": 0}
        state = State(Path(tempfile.mkdtemp(dir=self.host.root)))
        job = Job(CheckpointJob.parse(order, "test"), state, Progress("m"), threading.Event())
        with suppress(RigctlError, OSError):
            outcome = job.stage()
            assert outcome.record.manifest.identity() == self.identity
            job.repair(in_place=True)


@pytest.mark.parametrize("above", [False, True], ids=["its directory", "the one above"])
def test_everything_is_exchanged_while_root_stages(host: Host, above: bool) -> None:
    staging = Staging(host, above=above)
    with racing(ALICE, staging.act), racing(ALICE, staging.act):
        assert repeatedly(staging.work) > 3


def test_the_way_to_a_checkpoint_is_exchanged_while_root_removes_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(host, above=True)
    (host.precious / "m").mkdir()
    (host.precious / "m" / "kept").write_text(SECRET)
    host.before = look(host.precious)
    monkeypatch.chdir("/")
    with racing(ALICE, staging.act), racing(ALICE, staging.act):

        def work() -> None:
            with suppress(OSError):
                remove_tree(str(host.models / "m"))

        assert repeatedly(work) > 10


def test_files_of_a_checkpoint_are_exchanged_while_root_reads_them(host: Host) -> None:
    os.chown(host.models, ALICE, ALICE)
    exchange = host.exchanges(Place(str(host.models)), "config.json", "{}")
    with racing(ALICE, exchange):

        def work() -> None:
            with suppress(OSError), readable(host.models / "config.json") as file:
                assert SECRET.encode() not in file.read(1000)

        assert repeatedly(work) > 100


def test_no_lock_of_root_is_held_by_others(host: Host) -> None:
    path = host.root / "locks" / "x.lock"

    def act() -> None:
        subprocess.run(["flock", "-s", str(path), "sleep", "1"], check=False, stderr=subprocess.DEVNULL)

    with racing(ALICE, act):

        def work() -> None:
            with lock_files.locked(path, "busy", 1.0):
                pass

        assert repeatedly(work) > 10


def test_segments_that_are_no_files_end_no_clearing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    place = host.root / "shm"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(leftovers, "SHM", place)

    def act() -> None:
        path = place / f"vllm{random.randrange(4)}"
        with suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        made: list[Callable[[], None]] = [path.mkdir, path.touch]
        made += [lambda: path.symlink_to(host.precious), lambda: os.mkfifo(path)]
        one = random.choice(made)
        one()

    with racing(ALICE, act):

        def work() -> None:
            Place(str(place)).remove(*(one.name for one in leftovers.unused_segments(place)))

        assert repeatedly(work) > 3


def test_names_of_log_files_reach_no_terminal_as_they_are(host: Host) -> None:
    for name in ("\x1b]0;owned\x07.log", "a\nb.log", "-rf.log", "2026-01-01T00-00-00-1.log"):
        path = Path(str(host.unit.logs), name)
        path.write_text("x")
        os.chown(path, KIMI, KIMI)
    archive = host.root / "bundle.tar.gz"
    assert main(["doctor", "--output", str(archive)]) == 0
    with tarfile.open(archive) as packed:
        assert all(name.isprintable() for name in packed.getnames())
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
