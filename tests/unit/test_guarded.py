"""A compromised engine owns the directories of its unit: what it puts there is not followed, waited for or believed."""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import socket
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.artifacts.units import fallback_unit
from rigctl.bench import profile
from rigctl.cli import main
from rigctl.contract import happened, layout
from rigctl.guarded import RECORD_BYTES, Place, Unsafe
from rigctl.services import doctor, status
from rigctl.supervisor import measurement_pause
from rigctl.supervisor.ended import note
from rigctl.supervisor.engine_client import Engine
from rigctl.supervisor.specification import Specification, named
from tests.unit.serving import fields

KIMI, ALICE = 12345, 12346
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
RECORDS: list[type[happened.Happened]] = [
    happened.Started,
    happened.Watched,
    happened.Ended,
    happened.Accepted,
    happened.Failures,
    happened.Cause,
]
KEYS = sorted({key for model in RECORDS for key in model.model_fields})

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to other users")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail instead of hanging: a pipe without a writer is waited for in the kernel."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Unit:
    """The directories of one unit as systemd makes them, the service user's, and a file of root's beside them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root.chmod(0o755)
        self.secret = root / "id_ed25519"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        for name in ("CONFIGURATIONS", "RUNTIME", "SERVING", "LOGS", "CACHE"):
            (root / name).mkdir()
            monkeypatch.setattr(layout, name, str(root / name))
        Path(layout.specification_path("a")).write_text(json.dumps(fields(name="a")))
        for place in (self.specification.runtime, self.specification.state, self.specification.logs, self.cache):
            Path(str(place)).mkdir()
            os.chown(str(place), KIMI, KIMI)
        monkeypatch.setattr(
            status, "properties", lambda _, wanted: {**dict.fromkeys(wanted, ""), "ActiveState": "active"}
        )
        monkeypatch.setattr(status, "identities", lambda _: {})

    @property
    def specification(self) -> Specification:
        return named("a")

    @property
    def cache(self) -> Place:
        return self.specification.cache

    def file(self, place: Place, name: str, content: str = "") -> Path:
        """A file of the service user's."""
        path = Path(str(place), name)
        path.write_text(content)
        os.chown(path, KIMI, KIMI)
        return path


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unit]:
    # Not pytest's own: other users cannot enter those.
    with tempfile.TemporaryDirectory(prefix="unit-") as root:
        yield Unit(Path(root), monkeypatch)


def lay(kind: str, path: Path, secret: Path) -> None:
    """Put something where a file is expected, as the owner of the directory can."""
    match kind:
        case "link":
            path.symlink_to(secret)
        case "dangling":
            path.symlink_to(path.parent / "nowhere")
        case "second name":
            os.link(secret, path)
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(path))
        case "of another":
            path.write_text(SECRET)
            os.chown(path, ALICE, ALICE)
        case "endless":
            with path.open("wb") as file:
                file.truncate(1 << 40)


KINDS = ["link", "dangling", "second name", "pipe", "directory", "socket", "of another", "endless"]


@as_root
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_an_own_file_is_read(unit: Unit, kind: str) -> None:
    place = unit.specification.runtime
    lay(kind, Path(str(place), "started.json"), unit.secret)
    with within(5), pytest.raises(OSError) as failed:
        place.read("started.json")
    assert SECRET not in str(failed.value) and "started.json" in str(failed.value)
    place.remove("started.json")
    assert place.names("") == [] and unit.secret.read_text() == SECRET


@as_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_replaces_the_name_and_nothing_behind_it(unit: Unit, kind: str) -> None:
    place = unit.specification.runtime
    lay(kind, Path(str(place), "x"), unit.secret)
    with within(5):
        if kind == "directory":
            with pytest.raises(OSError, match="x"):
                place.write("x", b"new")
            return
        place.write("x", b"new")
    assert place.read("x") == b"new" and place.names("") == ["x"]
    assert unit.secret.read_text() == SECRET and stat.S_IMODE(unit.secret.stat().st_mode) == 0o600


@as_root
def test_the_directory_itself_may_be_exchanged(unit: Unit) -> None:
    place, outside = Path(str(unit.specification.runtime)), unit.secret.parent / "outside"
    outside.mkdir()
    (outside / "started.json").write_text(SECRET)
    place.rmdir()
    place.symlink_to(outside)
    with pytest.raises(Unsafe, match="symbolic link"):
        unit.specification.runtime.read("started.json")
    with pytest.raises(Unsafe):
        unit.specification.runtime.remove("started.json")
    assert (outside / "started.json").exists()


@as_root
def test_what_is_exchanged_while_it_is_removed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory at the first look, a file at the next: the other names go all the same."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    whole = os.unlink

    def exchanged(name: str, *, dir_fd: int) -> None:
        try:
            whole(name, dir_fd=dir_fd)
        except IsADirectoryError:
            (tmp_path / "a").rmdir()
            (tmp_path / "a").touch()
            raise

    monkeypatch.setattr(os, "unlink", exchanged)
    Place(str(tmp_path)).remove("a", "b")
    assert not (tmp_path / "b").exists()


def test_a_directory_in_one_of_another_user_is_no_place(unit: Unit) -> None:
    inner = Path(str(unit.specification.runtime), "inner")
    inner.mkdir()
    with pytest.raises(Unsafe, match=f"belongs to user {KIMI}"):
        Place(str(inner)).names("")
    inner.parent.chmod(0o777)
    os.chown(inner.parent, 0, 0)
    with pytest.raises(Unsafe, match="can be written by others"):
        Place(str(inner)).names("")


@pytest.mark.parametrize("name", ["../id_ed25519", "..", ".", "", "a/b"])
def test_a_name_is_one_name(unit: Unit, name: str) -> None:
    with pytest.raises(Unsafe):
        unit.specification.runtime.read(name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(RECORDS),
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner),
        ).map(lambda value: json.dumps(value).encode()),
        st.integers(1, 5000).map(lambda depth: b'{"proved": ' + b"[" * depth),
    ),
)
def test_any_bytes_are_a_record_or_a_reason(tmp_path: Path, model: type[happened.Happened], content: bytes) -> None:
    place = Place(str(tmp_path))
    place.write(model.FILE, content)
    try:
        found = model.read(place)
    except happened.Unreadable as error:
        assert model.FILE in str(error) and len(str(error)) < 4000 and str(error).isprintable()
    else:
        assert isinstance(found, model)


ODD = {
    "empty": "{}",
    "list": "[]",
    "deep": '{"digest": "a", "accepted_at": 1, "proved": ' + '{"a":' * 5000,
    "cut": '{"digest',
}


@as_root
@pytest.mark.parametrize("kind", [*KINDS, *ODD])
def test_status_answers_whatever_lies_there(unit: Unit, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place, record in ((unit.specification.runtime, m.FILE) for m in RECORDS):
        unit.file(place, record, ODD[kind]) if kind in ODD else lay(kind, Path(str(place), record), unit.secret)
    with within(10):
        assert main(["status", "--json"]) == 0
        [row] = json.loads(capsys.readouterr().out)
        assert main(["status"]) == 0
    assert row["stale"] and row["started"] is None
    assert any("what it was started with is not known" in remark for remark in row["remarks"])
    said = capsys.readouterr().out
    assert SECRET not in said and "STALE" in said


@as_root
@pytest.mark.parametrize("kind", KINDS)
def test_doctor_and_logs_show_nothing_of_others(
    unit: Unit, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "COMMANDS", {})
    monkeypatch.setattr(doctor, "_output", lambda _: "")
    lay(kind, Path(str(unit.specification.logs), "2026-01-01.log"), unit.secret)
    output = tmp_path / "bundle.tar.gz"
    with within(20):
        assert main(["doctor", "--output", str(output)]) == 0
        if kind != "endless":  # a log file may be long
            assert main(["logs", "a", "--run", "1"]) == 1
    with tarfile.open(output) as archive:
        texts = [(archive.extractfile(one) or pytest.fail()).read().decode() for one in archive.getmembers()]
    assert not any(SECRET in text for text in texts) and SECRET not in capfd.readouterr().out
    assert max(map(len, texts)) <= doctor.LOG_BYTES


def test_the_archive_goes_through_no_link(unit: Unit, tmp_path: Path) -> None:
    (tmp_path / "bundle").symlink_to(tmp_path / "elsewhere")
    assert main(["doctor", "--output", str(tmp_path / "bundle")]) == 1
    assert not (tmp_path / "elsewhere").exists()


def asked(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(Engine, "post", lambda *_, **__: None)
    monkeypatch.setattr(profile, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(profile, "WRITING_SECONDS", 0.2)
    return Engine(unit.specification)


@as_root
@pytest.mark.parametrize("where", ["profile", "profile/deeper"])
def test_a_sweep_of_profiles_leaves_what_a_link_leads_to(
    unit: Unit, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "etc"
    precious.mkdir()
    (precious / "receipt.json").write_text("{}")
    link = Path(str(unit.cache), where)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious)
    with within(20), pytest.raises(profile.ProfileFailed):
        profile.stop(asked(unit, monkeypatch))
    assert (precious / "receipt.json").exists()


@as_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_a_file_of_the_engine(unit: Unit, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(str(unit.cache), "profile").mkdir()
    lay(kind, Path(str(unit.cache), "profile", "x.json"), unit.secret)
    monkeypatch.setattr(profile, "TRACE_BYTES", 1 << 20)
    with within(20), pytest.raises(profile.ProfileFailed) as failed:
        profile.stop(asked(unit, monkeypatch))
    assert SECRET not in str(failed.value) and unit.secret.read_text() == SECRET


@settings(max_examples=50, deadline=None)
@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["traceEvents", "cat", "dur", "name"]), inner),
    ).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["x.json", "x.json.gz"]),
)
def test_any_bytes_are_a_trace_or_none(content: bytes, name: str) -> None:
    try:
        profile.kernels(io.BytesIO(content), name)
    except profile.ProfileFailed as error:
        assert name in str(error)


@as_root
def test_the_mark_of_a_benchmark_is_closed_to_others(unit: Unit) -> None:
    mark = unit.file(unit.specification.runtime, measurement_pause.MARK)
    mark.chmod(0o644)  # as the version before this one left it
    with measurement_pause.undisturbed(unit.specification):
        assert locks(mark, KIMI) and not locks(mark, ALICE)
        assert measurement_pause.is_measured(unit.specification)
    assert not measurement_pause.is_measured(unit.specification)


def locks(path: Path, uid: int) -> bool:
    """Whether a user can lock a file, so that its owner waits for ever."""
    command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "flock", "-sn", str(path), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_long_record_is_not_read(unit: Unit) -> None:
    unit.specification.runtime.write("x", b"x" * (RECORD_BYTES + 1))
    with pytest.raises(Unsafe, match="longer"):
        unit.specification.runtime.read("x")


@as_root
def test_the_fallback_reads_what_a_run_leaves(unit: Unit) -> None:
    """Its unit is root without a capability over other users' files (PrivateUsers=, CapabilityBoundingSet=)."""
    note(unit.specification.state, happened.Ended.FILE, {"cause": "the engine ended"})
    os.chown(Path(str(unit.specification.state), happened.Ended.FILE), KIMI, KIMI)
    groups = [KIMI] if "\nSupplementaryGroups=" in fallback_unit("kimi") else []
    (ready, say_ready), (mapped, say_mapped), (told, tell) = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups(groups)
        apart = ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
        os.write(say_ready, b"no" if apart else b"x")
        os.read(mapped, 1)
        found = happened.Ended.known(unit.specification.state)
        os.write(tell, str(found and found.cause).encode())
        os._exit(0)
    possible = os.read(ready, 2) == b"x"
    for table in ("uid_map", "gid_map") if possible else ():
        Path(f"/proc/{child}/{table}").write_text("0 0 1\n")
    os.write(say_mapped, b"x")
    said = os.read(told, 100).decode()
    os.waitpid(child, 0)
    for descriptor in (ready, say_ready, mapped, say_mapped, told, tell):
        os.close(descriptor)
    assert not possible or said == "the engine ended"
