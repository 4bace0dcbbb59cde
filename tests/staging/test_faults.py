"""Faults: no wrong byte is ever published, right bytes are not fetched again, the message says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rigctl.checkpoints import staging, workplace
from rigctl.checkpoints.http import SMALLEST_WINDOW, Adapter, HttpFetcher
from rigctl.checkpoints.progress import Progress
from rigctl.errors import RigctlError
from tests.staging.conftest import SHARD_BYTES, Bench, http_source, hub_source, same_files
from tests.staging.hubserver import COMMIT, Fault, Hub
from tests.staging.proxy import Proxy

SLACK = 0.01  # share of the total that may be fetched again


def shard(hub: Hub, number: int = 0) -> str:
    """Name of a shard."""
    return sorted(path for path in hub.paths() if path.endswith(".safetensors"))[number]


def total(hub: Hub) -> int:
    """Bytes of all files."""
    return sum((hub.root / path).stat().st_size for path in hub.paths())


def other_bytes(hub: Hub, path: str, place: Path, size: int | None = None) -> Path:
    """A file of the same (or another) size with other content."""
    real = (hub.root / path).read_bytes()
    place.write_bytes(bytes(byte ^ 1 for byte in real[:512]) + real[512:])
    if size is not None:
        os.truncate(place, size)
    return place


def wait_for(ready: Callable[[], bool], seconds: float = 300.0) -> None:
    """Poll without a busy loop."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_connection_cut_in_the_middle_of_a_shard(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    for number in range(5):
        hub.faults[shard(hub, number)] = Fault(cut=SHARD_BYTES // 2, times=2)
    bench.stage(hub_source(hub.address))
    assert same_files(bench.destination, checkpoint)
    assert hub.total_sent() <= total(hub) * (1 + SLACK)
    assert sum("again in" in event for event in bench.events) >= 5


def test_line_cut_and_throttled_by_a_proxy(bench: Bench, hub: Hub, proxy: Proxy, checkpoint: Path) -> None:
    proxy.rate = max(total(hub) // 8, 1 << 16)
    proxy.cut_after, proxy.cuts = total(hub) // 3, 2
    bench.stage(http_source(proxy.address), workers=2)
    assert proxy.cuts == 0
    assert same_files(bench.destination, checkpoint)
    # what was in the kernel's buffers when the line was cut is lost: at most a few 100 kB a connection
    lost = hub.total_sent() - total(hub)
    assert lost <= max(total(hub) * SLACK, 2 * 2 * (6 << 20))


def test_resume_after_a_cut_at_90_percent(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    hub.faults["*"] = Fault(status=503, times=10**6, only_after=int(total(hub) * 0.9))
    with pytest.raises(RigctlError, match=r"gave up after .* answers 503"):
        bench.stage(hub_source(hub.address), retries=1, workers=4)
    assert not bench.destination.exists()
    sent = hub.total_sent()
    hub.faults.clear()
    bench.stage(hub_source(hub.address))
    assert same_files(bench.destination, checkpoint)
    assert sent >= total(hub) * 0.9
    assert hub.total_sent() <= total(hub) * (1 + SLACK)


@pytest.mark.parametrize("left", ["whole", "longer", "wrong"])
def test_a_part_with_all_its_bytes_is_finished_or_fetched_again(
    bench: Bench, hub: Hub, checkpoint: Path, left: str
) -> None:
    """A server answers 416 to a range that begins at the end (huggingface/huggingface_hub#2197)."""
    name = shard(hub)
    hub.faults[name] = Fault(status=503, times=10**6)
    with pytest.raises(RigctlError, match="gave up"):
        bench.stage(hub_source(hub.address), retries=0)
    hub.faults.clear()
    real = (checkpoint / name).read_bytes()
    part = f"{hashlib.sha256(real).hexdigest()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    kept = {"whole": real, "longer": real + bytes(4096), "wrong": bytes(len(real))}[left]
    (bench.partial / "parts" / part).write_bytes(kept)
    sent = hub.total_sent()
    bench.stage(hub_source(hub.address))
    assert same_files(bench.destination, checkpoint)
    again = 0 if left == "whole" else len(real)
    assert hub.total_sent() - sent <= total(hub) - len(real) + again + total(hub) * SLACK


@pytest.fixture
def command(bench: Bench, hub: Hub) -> Iterator[Callable[[dict[str, Any]], subprocess.Popen[str]]]:
    """Start `rigctl checkpoints stage` as systemd would."""
    started: list[subprocess.Popen[str]] = []

    def start(keys: dict[str, Any]) -> subprocess.Popen[str]:
        content = {
            "format": 1,
            "name": "tiny",
            "destination": str(bench.destination),
            "source": hub_source(hub.address),
            "reserve_bytes": 0,
            "reserve_inodes": 0,
            "workers": 2,
            **keys,
        }
        (bench.root / "spec.json").write_text(json.dumps(content))
        environment = {**os.environ, "RIGCTL_CHECKPOINTS": str(bench.state.root)}
        environment["PYTHONPATH"] = str(Path(staging.__file__).parents[2])
        arguments = ["checkpoints", "stage", "tiny", "--spec", str(bench.root / "spec.json")]
        child = subprocess.Popen(
            [sys.executable, "-m", "rigctl", *arguments], env=environment, stderr=subprocess.PIPE, text=True
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_job_is_resumed(
    number: signal.Signals,
    bench: Bench,
    hub: Hub,
    checkpoint: Path,
    command: Callable[[dict[str, Any]], subprocess.Popen[str]],
) -> None:
    limit = total(hub) // 4
    child = command({"bandwidth_limit": limit})
    wait_for(lambda: hub.sent_so_far() > total(hub) // 3)
    child.send_signal(number)
    _, errors = child.communicate(timeout=120)
    assert child.returncode != 0 and not bench.destination.exists()
    if number == signal.SIGTERM:
        assert "kept" in errors and "Traceback" not in errors
    in_flight = hub.total_sent()
    kept = sum(place.stat().st_size for place in bench.partial.rglob("*") if place.is_file())
    bench.stage(hub_source(hub.address))
    assert same_files(bench.destination, checkpoint)
    assert bench.progress is not None
    # fetched in the second run: exactly what the first had not on disk (bookkeeping files are small)
    assert bench.progress.fetched <= total(hub) - kept + 64 * 1024
    assert in_flight < total(hub)


@pytest.mark.parametrize(("status", "headers"), [(503, {}), (429, {"Retry-After": "1"}), (500, {})])
def test_busy_server_is_asked_again(
    bench: Bench, hub: Hub, checkpoint: Path, status: int, headers: dict[str, str]
) -> None:
    hub.faults[shard(hub)] = Fault(status=status, times=2, headers=headers)
    hub.faults["resolve:" + shard(hub, 1)] = Fault(status=status, times=1, headers=headers)
    started = time.monotonic()
    bench.stage(hub_source(hub.address))
    assert same_files(bench.destination, checkpoint)
    assert hub.total_sent() == total(hub)
    assert any(f"answers {status}" in event for event in bench.events)
    if headers:
        assert time.monotonic() - started >= 2.0


def test_refused_token_in_the_middle_stops_at_once(bench: Bench, hub: Hub, tmp_path: Path) -> None:
    hub.token = "first"
    (tmp_path / "token").write_text("first")
    (tmp_path / "token").chmod(0o600)
    source, token = hub_source(hub.address), {"file": str(tmp_path / "token")}

    def expire() -> None:
        wait_for(lambda: hub.sent_so_far() > total(hub) // 3)
        hub.token = "second"

    watcher = threading.Thread(target=expire)
    watcher.start()
    with pytest.raises(RigctlError, match=r"answers 401: the token is .*run the job again"):
        bench.stage(source, token=token, workers=1, bandwidth_limit=total(hub) // 2)
    watcher.join()
    assert not bench.destination.exists()
    sent = hub.total_sent()
    assert total(hub) // 3 < sent < total(hub)
    (tmp_path / "token").write_text("second")
    bench.stage(source, token=token)
    assert hub.total_sent() <= total(hub) * (1 + SLACK)


def test_token_that_is_revoked_is_the_first_thing_said_whichever_workers_meet_it(
    bench: Bench, hub: Hub, tmp_path: Path
) -> None:
    hub.token = "first"
    (tmp_path / "token").write_text("first")
    (tmp_path / "token").chmod(0o600)

    def revoke() -> None:
        wait_for(lambda: hub.sent_so_far() > total(hub) // 3)
        hub.token = "second"

    watcher = threading.Thread(target=revoke)
    watcher.start()
    with pytest.raises(RigctlError) as caught:
        token = {"file": str(tmp_path / "token")}
        bench.stage(hub_source(hub.address), token=token, workers=8, bandwidth_limit=total(hub) // 2)
    watcher.join()
    first = str(caught.value).splitlines()[0]
    assert "answers 401: the token is" in first and "revoked" in first and "put a valid token into the file" in first
    assert not [event for event in bench.events if " 401" in event and "token" not in event]


def test_secret_file_that_others_read_is_refused(bench: Bench, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(RigctlError, match="chmod 600"):
        bench.stage(hub_source(hub.address), token={"file": str(tmp_path / "token")})


def test_signed_link_that_ran_out_is_renewed(bench: Bench, hub: Hub) -> None:
    hub.faults[shard(hub)] = Fault(status=403, times=1)
    assert bench.stage(hub_source(hub.address)).state == "staged"


def test_shard_with_wrong_bytes_is_never_published(bench: Bench, hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    bad = shard(hub, 7)
    hub.replaced[bad] = other_bytes(hub, bad, tmp_path / "bad")
    with pytest.raises(RigctlError, match=f"{bad}: .* twice: the source is damaged"):
        bench.stage(hub_source(hub.address))
    assert not bench.destination.exists()
    before = total(hub) + 2 * (checkpoint / bad).stat().st_size
    assert hub.total_sent() < before
    hub.replaced.clear()
    hub.forget_sent()
    bench.stage(hub_source(hub.address))
    assert set(hub.settled()) == {bad}
    assert same_files(bench.destination, checkpoint)


@pytest.mark.parametrize("honest", [True, False], ids=["new-etag", "same-etag"])
def test_shard_that_changes_between_attempts(  # noqa: PLR0917
    bench: Bench, hub: Hub, checkpoint: Path, tmp_path: Path, honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = shard(hub, 2)
    if not honest:
        monkeypatch.setattr("tests.staging.hubserver._Handler.etag", lambda self, path: "always-the-same")
    hub.replaced[name] = other_bytes(hub, name, tmp_path / "old")
    hub.faults[name] = Fault(cut=SHARD_BYTES // 2, times=1)

    def restore() -> None:
        wait_for(lambda: hub.faults[name].times == 0)
        wait_for(lambda: hub.sent[name] >= SHARD_BYTES // 2)
        hub.replaced.clear()

    watcher = threading.Thread(target=restore)
    watcher.start()
    bench.stage(hub_source(hub.address), backoff=0.5)
    watcher.join()
    assert same_files(bench.destination, checkpoint)
    expected = "the source's file changed" if honest else "its bytes have"
    assert any(expected in event or "from its start" in event for event in bench.events)


def test_file_longer_than_its_manifest(bench: Bench, hub: Hub, tmp_path: Path) -> None:
    name = shard(hub)
    longer = other_bytes(hub, name, tmp_path / "long", (hub.root / name).stat().st_size + 4096)
    manifest = bench.pin(hub)
    hub.replaced[name] = longer
    with pytest.raises(RigctlError, match=f"{name}: .* bytes at .* in the manifest"):
        bench.stage(hub_source(hub.address), manifest=manifest)
    with pytest.raises(RigctlError, match=f"{name}: .* bytes at .* in the manifest"):
        bench.stage(
            http_source(hub.address),
            manifest=manifest,
            name="plain",
            destination=str(bench.root / "models/p"),
        )
    assert not bench.destination.exists() and not (bench.root / "models/p").exists()


def test_server_without_ranges_starts_over(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    hub.ranges = False
    hub.faults[shard(hub)] = Fault(cut=SHARD_BYTES // 2, times=1)
    bench.stage(hub_source(hub.address))
    assert same_files(bench.destination, checkpoint)
    assert any("from its start" in event for event in bench.events)


def test_wrong_revision_is_refused(bench: Bench, hub: Hub) -> None:
    manifest = bench.pin(hub)
    hub.commit = "d" * 40
    with pytest.raises(RigctlError, match=f"answers for commit d{{40}}, wanted {COMMIT}"):
        bench.stage(hub_source(hub.address), manifest=manifest)
    with pytest.raises(RigctlError, match="pin again"):
        bench.stage(hub_source(hub.address, revision="d" * 40), manifest=manifest)
    with pytest.raises(RigctlError, match=f"does not know revision {COMMIT}"):
        bench.stage(hub_source(hub.address))
    with pytest.raises(RigctlError, match="moving name"):
        bench.spec(hub_source(hub.address, revision="main"))


def test_unpinned_repository_is_refused_unless_allowed(bench: Bench, hub: Hub) -> None:
    with pytest.raises(RigctlError, match="no pinned revision"):
        bench.stage(hub_source(hub.address, revision=None))
    outcome = bench.stage(hub_source(hub.address, revision=None, allow_unpinned=True))
    assert outcome.record.manifest.revision == COMMIT


@pytest.fixture
def small_disk(tmp_path: Path, hub: Hub) -> Iterator[Path]:
    """A file system of its own with a quarter more room than the checkpoint needs."""
    place = tmp_path / "disk"
    place.mkdir()
    size = total(hub) * 5 // 4 + (2 << 20)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "rigctl-test", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", place], check=True)


def test_disk_full_in_the_middle(bench: Bench, hub: Hub, checkpoint: Path, small_disk: Path) -> None:
    destination = small_disk / "tiny"

    def fill() -> None:
        wait_for(lambda: hub.sent_so_far() > total(hub) // 3)
        with (small_disk / "filler").open("wb", buffering=0) as handle:
            try:
                while handle.write(b"x" * (1 << 20)):
                    pass
            except OSError:
                pass

    filler = threading.Thread(target=fill)
    filler.start()
    with pytest.raises(RigctlError, match=r"the disk is full: .*make room and run the job again"):
        bench.stage(hub_source(hub.address), destination=str(destination), bandwidth_limit=total(hub) // 2, workers=2)
    filler.join()
    assert not destination.exists()
    (small_disk / "filler").unlink()
    # another file system than the state directory's, and nothing right is fetched twice
    bench.stage(hub_source(hub.address), destination=str(destination))
    assert same_files(destination, checkpoint)
    assert hub.total_sent() - total(hub) <= max(total(hub) * SLACK, 3 * (4 << 20))
    assert bench.progress is not None and bench.progress.fetched < total(hub)


def test_destination_on_another_file_system(bench: Bench, hub: Hub, checkpoint: Path, small_disk: Path) -> None:
    """Reached by a link; all work is done there, since a rename cannot leave a file system."""
    bench.destination.symlink_to(small_disk / "tiny")
    hub.faults["*"] = Fault(status=503, times=10**6, only_after=total(hub) // 2)
    with pytest.raises(RigctlError, match=r"gave up after .* answers 503"):
        bench.stage(hub_source(hub.address), retries=1)
    assert (small_disk / ".tiny.partial").is_dir() and not bench.partial.exists()
    assert not (small_disk / "tiny").exists()
    hub.faults.clear()
    bench.stage(hub_source(hub.address))
    assert same_files(small_disk / "tiny", checkpoint) and not (small_disk / ".tiny.partial").exists()
    assert hub.total_sent() - total(hub) <= total(hub) * SLACK + (8 << 20)
    assert bench.stage(hub_source(hub.address)).state == "present"


def test_no_room_is_said_before_the_first_byte(bench: Bench, hub: Hub, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(b"x" * (total(hub) // 2 + (2 << 20)))
    with pytest.raises(RigctlError, match=r"are missing; nothing was fetched"):
        bench.stage(hub_source(hub.address), destination=str(small_disk / "tiny"))
    assert hub.total_sent() == 0 and not (small_disk / ".tiny.partial").exists()
    (small_disk / "other").unlink()
    with pytest.raises(RigctlError, match=r"inodes free, .*nothing was fetched"):
        bench.stage(hub_source(hub.address), destination=str(small_disk / "tiny"), reserve_inodes=10**12)
    with pytest.raises(RigctlError, match="is a mount point"):
        bench.stage(hub_source(hub.address), destination=str(small_disk))


def test_operators_half_copied_model_is_reported_and_left_alone(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, bench.destination)
    name = shard(hub, 4)
    os.truncate(bench.destination / name, 100)
    (bench.destination / shard(hub, 9)).unlink()
    before = {place: place.stat().st_mtime_ns for place in bench.destination.rglob("*")}
    with pytest.raises(RigctlError, match=r"(?s)not the whole checkpoint.*Nothing in it was touched") as caught:
        bench.stage(hub_source(hub.address))
    assert name in str(caught.value) and shard(hub, 9) in str(caught.value)
    assert before == {place: place.stat().st_mtime_ns for place in bench.destination.rglob("*")}
    assert hub.total_sent() == 0
    with pytest.raises(RigctlError, match="--in-place"):
        bench.job(bench.spec(hub_source(hub.address))).repair(in_place=False)
    outcome = bench.job(bench.spec(hub_source(hub.address))).repair(in_place=True)
    assert set(hub.settled()) == {name, shard(hub, 9)}
    assert outcome.record.origin == "adopted" and same_files(bench.destination, checkpoint)


def test_symlinked_destination_stays_a_link(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    real = bench.root / "big-disk"
    real.mkdir()
    bench.destination.symlink_to(real / "tiny")
    bench.stage(hub_source(hub.address))
    assert bench.destination.is_symlink() and same_files(real / "tiny", checkpoint)
    assert bench.stage(hub_source(hub.address)).state == "present"
    loop = bench.root / "models" / "loop"
    loop.symlink_to(loop)
    with pytest.raises(RigctlError, match=r"link to itself|cannot be resolved"):
        bench.stage(hub_source(hub.address), name="loop", destination=str(loop))


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "a\\..\\b", "a\nb", "."])
def test_names_that_try_to_leave_the_directory(bench: Bench, hub: Hub, name: str) -> None:
    hub.extra_listed.append({"type": "file", "path": name, "size": 1, "oid": "0" * 40})
    with pytest.raises(RigctlError, match="unsafe file name"):
        bench.stage(hub_source(hub.address))
    assert hub.total_sent() == 0 and not bench.destination.exists()


def test_links_planted_in_the_workplace_are_not_written_through(bench: Bench, hub: Hub, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (bench.partial / "tree").mkdir(parents=True)
    (bench.partial / "owner.json").write_text("{}")
    (bench.partial / "tree" / "figures").symlink_to(outside)
    bench.stage(hub_source(hub.address))
    assert not list(outside.iterdir())
    assert (bench.destination / "figures" / "logo.svg").read_text() == "<svg/>"
    assert not (bench.destination / "figures").is_symlink()


def test_workplace_of_somebody_else_is_refused(bench: Bench, hub: Hub) -> None:
    bench.partial.mkdir()
    (bench.partial / "theirs").write_text("x")
    with pytest.raises(RigctlError, match="not this program's"):
        bench.stage(hub_source(hub.address))
    assert (bench.partial / "theirs").read_text() == "x" and hub.total_sent() == 0


def test_crash_between_the_rename_and_the_record_is_finished(
    bench: Bench, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workplace.Workplace, "close", die)
        with pytest.raises(KeyboardInterrupt):
            bench.stage(hub_source(hub.address))
    assert bench.destination.exists() and bench.state.load("tiny") is None
    sent = hub.total_sent()
    outcome = bench.stage(hub_source(hub.address))
    assert outcome.state == "present" and outcome.record.origin == "staged" and hub.total_sent() == sent
    assert not bench.partial.exists()


def test_destination_that_appears_meanwhile_is_left_alone(
    bench: Bench, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging.Job._check_structure

    def appear(job: staging.Job) -> None:
        real(job)
        bench.destination.mkdir()
        (bench.destination / "theirs").write_text("x")

    monkeypatch.setattr(staging.Job, "_check_structure", appear)
    with pytest.raises(RigctlError, match="appeared while this job ran"):
        bench.stage(hub_source(hub.address))
    assert [place.name for place in bench.destination.iterdir()] == ["theirs"]


def test_new_revision_reuses_equal_files_of_an_unfinished_one(
    bench: Bench, hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    hub.faults["*"] = Fault(status=503, times=10**6, only_after=total(hub) // 2)
    with pytest.raises(RigctlError, match="gave up"):
        bench.stage(hub_source(hub.address), retries=0)
    hub.faults.clear()
    changed = tmp_path / "next"
    shutil.copytree(checkpoint, changed)
    (changed / "config.json").write_text('{"changed": true}')
    (changed / "README.md").unlink()
    hub.root, hub.commit = changed, "e" * 40
    bench.stage(hub_source(hub.address, revision="e" * 40))
    assert same_files(bench.destination, changed)
    assert hub.total_sent() <= total(hub) * (1 + SLACK) + 4096


def test_incomplete_selection_is_not_published(bench: Bench, hub: Hub) -> None:
    with pytest.raises(RigctlError, match=r"(?s)not a loadable checkpoint.*tool_declaration.py is missing"):
        bench.stage(hub_source(hub.address, exclude=["tool_declaration.py", shard(hub)]))
    assert not bench.destination.exists()


def test_small_checkpoint_keeps_receive_buffers_small(bench: Bench) -> None:
    """What lies in them is lost with a kill; a large checkpoint leaves them to the kernel."""
    fetcher = HttpFetcher(bench.spec(http_source("http://127.0.0.1:9")), Progress("tiny"), threading.Event())
    four = (4 << 30) // 400 // 8
    for total_bytes, window in ((0, None), (1 << 20, SMALLEST_WINDOW), (4 << 30, four), (1 << 40, None)):
        fetcher.progress.total = total_bytes
        assert fetcher._window() == window
    with socket.create_server(("127.0.0.1", 0)) as server:
        fetcher.progress.total = 1 << 20
        session = fetcher.session()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        adapter = session.get_adapter(address)
        assert isinstance(adapter, Adapter)
        pool = adapter.poolmanager.connection_from_url(address)
        connection = pool._new_conn()
        connection.connect()
        # socket(7): the kernel doubles what it is asked for
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * SMALLEST_WINDOW
        connection.close()
