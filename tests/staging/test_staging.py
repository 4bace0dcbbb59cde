"""Staging that goes well: every source, nothing fetched twice, what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rigctl.checkpoints import staging, verify
from rigctl.checkpoints.record import quick_report
from rigctl.errors import RigctlError
from tests.staging.conftest import SHARDS, Bench, http_source, hub_source, same_files
from tests.staging.hubserver import COMMIT, TOKEN, Hub
from tests.staging.proxy import Proxy


def test_hub_is_staged_whole_with_the_real_client(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    outcome = bench.stage(hub_source(hub.address))
    assert outcome.state == "staged" and outcome.changed
    assert same_files(bench.destination, checkpoint)
    assert outcome.record.manifest.revision == COMMIT
    assert len([file for file in outcome.record.manifest.files if file.sha256]) == SHARDS + 1
    assert hub.total_sent() == outcome.record.manifest.total
    assert not bench.partial.exists()
    modes = {stat.S_IMODE(place.stat().st_mode) for place in bench.destination.rglob("*") if place.is_file()}
    assert modes == {0o444} and stat.S_IMODE(bench.destination.stat().st_mode) == 0o555
    again = bench.stage(hub_source(hub.address), manifest=None)
    assert again.state == "present" and not again.changed
    assert hub.total_sent() == outcome.record.manifest.total


def test_token_comes_from_a_credential_and_reaches_the_hub_only(
    bench: Bench, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.token = TOKEN
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "hub-token").write_text(TOKEN + "\n")
    source, token = hub_source(hub.address), {"credential": "hub-token"}
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(RigctlError, match="CREDENTIALS_DIRECTORY is not set"):
        bench.stage(source, token=token)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    # the storage server answers 400 to a request that carries a token
    assert bench.stage(source, token=token).state == "staged"
    told = json.dumps(bench.events) + bench.state.record_path("tiny").read_text()
    assert TOKEN not in told


def test_time_is_estimated_from_a_short_probe(bench: Bench, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PROBE_FROM", 0)
    job = bench.job(bench.spec(hub_source(hub.address), workers=1))
    manifest = job.manifest()
    assert manifest is not None
    plan = job.plan(manifest)
    assert plan.rate and plan.seconds == pytest.approx(plan.bytes_needed / plan.rate)
    assert 0 < hub.total_sent() < total_of(hub) and not bench.partial.exists()
    limited = bench.job(bench.spec(hub_source(hub.address), bandwidth_limit=1000)).plan(manifest)
    assert limited.seconds == limited.bytes_needed / 1000


def test_include_and_exclude_select_files(bench: Bench, hub: Hub) -> None:
    outcome = bench.stage(hub_source(hub.address, exclude=["figures/*", "*.md"]))
    names = {file.path for file in outcome.record.manifest.files}
    assert "config.json" in names and not any(name.endswith((".md", ".svg")) for name in names)
    assert not (bench.destination / "figures").exists()


def test_http_directory_with_manifest(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    assert bench.stage(http_source(hub.address)).state == "staged"
    assert same_files(bench.destination, checkpoint)


def test_local_directory(bench: Bench, checkpoint: Path) -> None:
    assert bench.stage({"kind": "local", "path": str(checkpoint)}).state == "staged"
    assert same_files(bench.destination, checkpoint)


def test_mirror_takes_over_when_the_endpoint_is_down(bench: Bench, hub: Hub, proxy: Proxy) -> None:
    pinned = bench.pin(hub)
    proxy.down = True
    outcome = bench.stage(hub_source(proxy.address, mirror=hub.address), workers=4, manifest=pinned)
    assert outcome.state == "staged" and hub.total_sent() == outcome.record.manifest.total


def test_chunked_transfer_that_fails_is_taken_over_by_http(
    bench: Bench, hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    hub.xet = True  # the hub offers it, but nobody serves its token: the real hf_xet client fails
    monkeypatch.setattr("rigctl.checkpoints.hub.XET_FROM", 1)
    monkeypatch.setenv("PYTHONPATH", str(Path(staging.__file__).parents[2]))
    assert bench.stage(hub_source(hub.address), workers=2).state == "staged"
    assert same_files(bench.destination, checkpoint)
    assert any("chunked transfer failed" in event for event in bench.events)


UPLOAD = """
import hf_xet, sys
with hf_xet.XetSession().new_upload_commit(endpoint=sys.argv[1]) as commit:
    sent = [commit.start_upload_bytes(open(path, "rb").read(), hf_xet.SKIP_SHA256) for path in sys.argv[2:]]
print(*(upload.result().xet_info.hash for upload in sent))
"""


def test_chunked_transfer_goes_on_inside_a_file(
    bench: Bench, hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real hf_xet with a storage of its own on disk: nothing of the two files comes by http."""
    hub.xet_storage = f"local://{tmp_path}/storage"
    first, second = shards = sorted(checkpoint.glob("*.safetensors"))[:2]
    # By a process of its own, as one alone can have this storage open.
    sent = subprocess.run([sys.executable, "-c", UPLOAD, hub.xet_storage, *shards], stdout=subprocess.PIPE, check=True)
    hub.xet_hashes = {path.name: name for path, name in zip(shards, sent.stdout.decode().split(), strict=True)}
    monkeypatch.setattr("rigctl.checkpoints.hub.XET_FROM", 1)
    job = bench.job(bench.spec(hub_source(hub.address), workers=1))
    manifest = job.manifest()
    assert manifest is not None
    part = job.workplace.part(manifest.by_path[second.name])
    part.parent.mkdir(parents=True, mode=0o700)
    (bench.partial / "owner.json").write_text("{}")
    part.write_bytes(second.read_bytes()[:1000])
    assert job.stage().state == "staged" and same_files(bench.destination, checkpoint)
    assert not [event for event in bench.events if "chunked transfer failed" in event or "dropped" in event]
    assert hub.sent[first.name] == hub.sent[second.name] == 0 < hub.total_sent()
    assert job.progress.fetched == manifest.total - 1000


@pytest.fixture
def here_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh that runs the command on this machine, whatever host it is for."""
    options = "while case $1 in -*) true;; *) false;; esac; do shift 2; done"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\n{options}\nshift\nexec sh -c "$*"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


def test_one_tree_to_another_by_ssh(bench: Bench, checkpoint: Path, here_by_ssh: None) -> None:
    source = {"kind": "rsync", "host": "store.example.com", "path": str(checkpoint)}
    assert bench.stage(source, workers=2).state == "staged"
    assert same_files(bench.destination, checkpoint)


def test_what_rsync_began_is_continued_or_replaced(bench: Bench, checkpoint: Path, here_by_ssh: None) -> None:
    incoming = bench.partial / "incoming"
    incoming.mkdir(parents=True)
    (bench.partial / "owner.json").write_text("{}")
    shards = sorted(checkpoint.glob("*.safetensors"))
    size = shards[0].stat().st_size
    (incoming / shards[0].name).write_bytes(shards[0].read_bytes()[: size // 2])
    (incoming / shards[1].name).write_bytes(b"x" * (size // 2))
    assert bench.stage({"kind": "rsync", "host": "store.example.com", "path": str(checkpoint)}).state == "staged"
    assert same_files(bench.destination, checkpoint)
    assert [event for event in bench.events if "are dropped" in event and shards[1].name in event]
    assert not [event for event in bench.events if "are dropped" in event and shards[0].name in event]


@pytest.mark.skipif(
    not Path("/usr/sbin/sshd").exists() or os.geteuid() != 0,
    reason="needs root and sshd",
)
def test_another_host_over_ssh(bench: Bench, checkpoint: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    port = 22000 + os.getpid() % 2000
    (keys / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\n"
        f"PidFile {keys}/pid\nStrictModes no\nPermitRootLogin prohibit-password\nUsePAM no\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", keys / "sshd_config"], stderr=subprocess.DEVNULL)
    try:
        host_key = (keys / "host.pub").read_text().split()
        source = {
            "kind": "rsync",
            "host": "127.0.0.1",
            "user": "root",
            "port": port,
            "path": str(checkpoint),
            "identity_file": str(keys / "user"),
            "known_hosts": str(keys / "known_hosts"),
        }
        (keys / "known_hosts").write_text("")
        time.sleep(0.5)
        with pytest.raises(RigctlError, match="Host key verification failed"):
            bench.stage(source)
        (keys / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key[0]} {host_key[1]}\n")
        assert bench.stage(source).state == "staged"
        assert same_files(bench.destination, checkpoint)
    finally:
        server.terminate()
        server.wait()


def test_generator_writes_what_becomes_the_checkpoint(bench: Bench) -> None:
    source, first = {"kind": "generator", "generator": "drafter-always"}, "v1"
    outcome = bench.stage(source, role="drafter", generator_revision=first)
    assert outcome.state == "staged" and outcome.record.manifest.revision == "v1"
    assert {file.path for file in outcome.record.manifest.files} == {"config.json", "model.safetensors"}
    assert bench.stage(source, role="drafter", generator_revision=first).state == "present"
    with pytest.raises(RigctlError, match="holds v1, the spec wants v2"):
        bench.stage(source, role="drafter", generator_revision="v2")
    replaced = bench.stage(source, role="drafter", generator_revision="v2", replace=True)
    assert replaced.state == "staged" and replaced.record.manifest.revision == "v2"
    assert not bench.partial.exists() and quick_report(replaced.record).complete
    with pytest.raises(RigctlError, match=r"generator:x ended with"):
        (bench.root / "other").mkdir()
        bench.stage(
            {"kind": "generator", "generator": "x"},
            name="other",
            destination=str(bench.root / "other" / "x"),
        )


def test_a_tiny_model_is_staged_by_its_generator(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(staging.__file__).parents[2]))
    source = {"kind": "generator", "generator": "drafter-half"}
    outcome = bench.stage(source, role="drafter", generator_revision="1")
    assert outcome.state == "staged" and "model.safetensors" in outcome.record.seen
    assert bench.stage(source, role="drafter", generator_revision="1").state == "present"


def test_right_directory_is_adopted_and_not_touched(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, bench.destination)
    (bench.destination / "operators-notes.txt").write_text("mine")
    before = {place: place.stat() for place in [bench.destination, *bench.destination.rglob("*")]}
    outcome = bench.stage(hub_source(hub.address))
    assert outcome.state == "adopted" and outcome.record.foreign == ["operators-notes.txt"]
    assert hub.total_sent() == 0
    for place, status in before.items():
        now = place.stat()
        assert (now.st_mode, now.st_mtime_ns, now.st_ctime_ns) == (
            status.st_mode,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
    assert bench.stage(hub_source(hub.address)).state == "present"


def test_complete_directory_is_adopted_without_the_hub(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, bench.destination)
    before = {place: place.stat().st_ctime_ns for place in [bench.destination, *bench.destination.rglob("*")]}
    wanted = hub_source("https://127.0.0.1:9")
    outcome = bench.stage(wanted)
    assert outcome.state == "adopted" and outcome.record.manifest.revision is None
    assert "not compared with its source" in bench.events[-1] and "cannot be asked" in bench.events[-1]
    assert before == {place: place.stat().st_ctime_ns for place in [bench.destination, *bench.destination.rglob("*")]}
    assert bench.stage(wanted).state == "present"
    assert bench.stage(hub_source(hub.address)).state == "present"


def test_incomplete_directory_is_refused_without_the_hub(bench: Bench, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, bench.destination)
    shards = sorted(bench.destination.glob("*.safetensors"))
    shards[3].unlink()
    os.truncate(shards[5], 100)
    with pytest.raises(RigctlError, match=r"(?s)cannot be loaded as it is.*Nothing in it was touched") as caught:
        bench.stage(hub_source("https://127.0.0.1:9"), retries=0)
    assert shards[3].name in str(caught.value) and shards[5].name in str(caught.value)
    assert bench.state.load("tiny") is None


def test_another_pinned_revision_of_an_adopted_directory_is_told(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, bench.destination)
    assert bench.stage(hub_source(hub.address)).state == "adopted"
    with pytest.raises(RigctlError, match="nothing was touched"):
        bench.stage({**hub_source(hub.address), "revision": "0" * 40})


def test_directory_without_a_manifest_is_adopted_by_its_files(bench: Bench, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, bench.destination)
    wanted = bench.spec({"kind": "local", "path": str(bench.destination)}, role="drafter")
    record = bench.job(wanted).stage().record
    assert record.origin == "adopted" and all(file.sha256 for file in record.manifest.files)
    assert quick_report(record).complete
    shard = next(bench.destination.glob("*.safetensors"))
    with shard.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"?")
    assert shard.name in quick_report(record).damaged
    with pytest.raises(RigctlError, match="adopt it again if the change is yours"):
        bench.job(wanted).stage()
    job = bench.job(wanted)
    assert quick_report(job.adopt().record).complete


def test_repair_fetches_only_what_is_wrong(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    outcome = bench.stage(hub_source(hub.address))
    shards = sorted(bench.destination.glob("*.safetensors"))
    bench.destination.chmod(0o755)
    shards[3].chmod(0o644)
    with shards[3].open("r+b") as handle:
        handle.seek(1000)
        handle.write(b"rot")
    shards[5].unlink()
    bench.destination.chmod(0o555)
    with pytest.raises(RigctlError, match=f"(?s)damaged: {shards[3].name}.*missing: {shards[5].name}"):
        bench.stage(hub_source(hub.address))
    hub.forget_sent()
    job = bench.job(bench.spec(hub_source(hub.address)))
    assert job.repair(in_place=False).state == "repaired"
    assert set(hub.settled()) == {shards[3].name, shards[5].name}
    assert same_files(bench.destination, checkpoint)
    assert stat.S_IMODE(shards[5].stat().st_mode) == 0o444
    assert stat.S_IMODE(bench.destination.stat().st_mode) == 0o555
    assert bench.stage(hub_source(hub.address)).state == "present"
    full = verify.full(bench.destination, outcome.record.manifest)
    assert full.complete and full.checked == len(outcome.record.manifest.files)


def test_bandwidth_limit_is_kept_by_all_workers_together(bench: Bench, hub: Hub) -> None:
    wanted = sum((hub.root / path).stat().st_size for path in hub.paths())
    limit = max(wanted // 2, 1)
    started = time.monotonic()
    bench.stage(hub_source(hub.address), bandwidth_limit=limit)
    taken = time.monotonic() - started
    assert taken > 1.8


def test_second_job_is_refused_and_can_follow(bench: Bench, hub: Hub) -> None:
    wanted = bench.spec(hub_source(hub.address), bandwidth_limit=max(1, total_of(hub) // 3))
    worker = threading.Thread(target=bench.job(wanted).stage)
    worker.start()
    time.sleep(1.0)
    with pytest.raises(RigctlError, match=r"running already .*follow"):
        bench.stage(hub_source(hub.address))
    with pytest.raises(RigctlError, match="running already"):
        bench.stage(hub_source(hub.address), name="other-name-same-place")
    worker.join()
    assert bench.stage(hub_source(hub.address)).state == "present"


def total_of(hub: Hub) -> int:
    return sum((hub.root / path).stat().st_size for path in hub.paths())


def test_command_line_shows_progress_and_state(bench: Bench, hub: Hub, tmp_path: Path) -> None:
    content = {
        "format": 1,
        "name": "tiny",
        "destination": str(bench.destination),
        "source": hub_source(hub.address),
        "reserve_bytes": 0,
        "reserve_inodes": 0,
    }
    (tmp_path / "spec.json").write_text(json.dumps(content))
    environment = {**os.environ, "RIGCTL_CHECKPOINTS": str(bench.state.root)}
    environment["PYTHONPATH"] = str(Path(staging.__file__).parents[2])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rigctl", "checkpoints", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    plan = run("stage", "tiny", "--spec", str(tmp_path / "spec.json"), "--plan", "--json")
    assert plan.returncode == 0 and json.loads(plan.stdout)["bytes_needed"] == total_of(hub)
    assert hub.total_sent() < total_of(hub) // 10 and not bench.destination.exists()
    done = run("stage", "tiny", "--spec", str(tmp_path / "spec.json"), "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and lines[-1]["outcome"] == "staged" and lines[-1]["changed"] is True
    assert json.loads(run("status", "--json").stdout)["state"] == "complete"
    assert run("verify", "--full").returncode == 0
    assert run("follow", "tiny").returncode == 0
    (bench.destination / "config.json").chmod(0o644)
    (bench.destination / "config.json").write_text("{ }")
    bad = run("verify", "tiny")
    assert bad.returncode == 1 and "config.json" in bad.stdout and "--full" in bad.stderr
