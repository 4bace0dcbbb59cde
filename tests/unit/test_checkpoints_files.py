"""Manifests, safe names, verification, records, specs: the parts without a network."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from rigctl.checkpoints import paths, record, verify
from rigctl.checkpoints.progress import Progress, Reporter, human_bytes, human_seconds, line
from rigctl.checkpoints.sink import Limiter, Sink, SourceWrong
from rigctl.checkpoints.verify import FileHasher
from rigctl.cli import main
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import File, Manifest
from rigctl.contract.sources import HubSource, LocalSource
from rigctl.errors import RigctlError


def tree(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below a directory."""
    for name, content in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return root


FILES = {"config.json": b"{}", "a/b.bin": b"1234" * 1000, "model.safetensors": os.urandom(5000)}


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\\b", "a\0b", "a\nb", "x" * 256])
def test_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(RigctlError, match="unsafe file name"):
        paths.safe_relative(name)


def test_names_with_dots_and_spaces_are_fine() -> None:
    assert paths.safe_relative("a b/..c/.hidden") == "a b/..c/.hidden"


def test_writing_through_a_linked_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sub").symlink_to(tmp_path / "out")
    with pytest.raises(RigctlError, match="symbolic link"):
        paths.inside(tmp_path / "in", "sub/file")


def test_git_blob_id_is_what_git_says(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"kimi\n" * 1000)
    told = subprocess.run(["git", "hash-object", place], capture_output=True, text=True, check=True)
    digest, _ = verify.hash_file(place, FileHasher("git_sha1", place.stat().st_size))
    assert digest == f"git_sha1:{told.stdout.strip()}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "JSON object"),
        ({"format": 2, "files": []}, "format 2"),
        ({"format": 1, "files": []}, "files: a manifest lists at least one file"),
        ({"format": 1, "files": [{"size": 1}]}, "files.0.path: is missing"),
        ({"format": 1, "files": [{"path": "a", "size": -1, "sha256": "0" * 64}]}, "size"),
        ({"format": 1, "files": [{"path": "a", "size": True, "sha256": "0" * 64}]}, "size"),
        ({"format": 1, "files": [{"path": "a", "size": 1}]}, "nothing proves"),
        (
            {"format": 1, "files": [{"path": "a", "size": 1, "sha256": "xyz"}]},
            "files.0.sha256: a sha256 is 64 hex digits",
        ),
        (
            {"format": 1, "files": [{"path": "a", "size": 1, "sha": "0"}]},
            'files.0.sha: there is no such key, did you mean "sha256"',
        ),
        ({"format": 1, "files": [{"path": "../a", "size": 1, "sha256": "0" * 64}]}, "unsafe"),
        ({"format": 1, "files": [{"path": "a", "size": 1, "sha256": "0" * 64}] * 2}, "twice"),
        (
            {"format": 1, "files": [{"path": name, "size": 1, "sha256": "0" * 64} for name in ("a", "a/b")]},
            "both a file and the directory",
        ),
    ],
)
def test_wrong_manifests_are_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(RigctlError, match=message):
        Manifest.parse(content, "here")


def test_manifest_survives_its_file_form_and_upper_case_digests(tmp_path: Path) -> None:
    made, _ = verify.manifest_of(tree(tmp_path / "m", FILES), "local:m")
    content = json.loads(json.dumps(made.document()))
    content["files"][0]["sha256"] = content["files"][0]["sha256"].upper()
    assert Manifest.parse(content, "x") == made
    assert made.wanted(selecting(include=["*.json"]), {}).total == 2
    kept = made.wanted(selecting(exclude=["a/*"]), {})
    assert [file.path for file in kept.files] == ["config.json", "model.safetensors"]
    with pytest.raises(RigctlError, match="leave no file"):
        made.wanted(selecting(include=["nothing*"]), {})


def selecting(**patterns: list[str]) -> LocalSource:
    return LocalSource(kind="local", path="/m", **patterns)


def test_known_digests_must_agree_where_they_are_of_selected_files(tmp_path: Path) -> None:
    made, _ = verify.manifest_of(tree(tmp_path / "m", FILES), "local:m")
    source = selecting(exclude=["a/*"])
    assert made.wanted(source, {"a/b.bin": "0" * 64}) == made.wanted(source, {})
    for wrong in ({"config.json": "0" * 64}, {"absent.json": "0" * 64}):
        with pytest.raises(RigctlError, match="it is not that revision"):
            made.wanted(source, wrong)


def test_full_and_quick_verification_name_what_is_wrong(tmp_path: Path) -> None:
    root = tree(tmp_path / "m", {**FILES, "gone": b"x", "short": b"12345", "rot": b"12345"})
    made, seen = verify.manifest_of(root, "m")
    assert verify.full(root, made).complete and verify.quick(root, made, seen).complete
    (root / "gone").unlink()
    (root / "short").write_bytes(b"123")
    status = (root / "rot").stat()
    (root / "rot").write_bytes(b"1234?")
    os.utime(root / "rot", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "stray").write_bytes(b"")
    full = verify.full(root, made)
    assert set(full.damaged) == {"short", "rot"} and full.missing == ["gone"]
    assert verify.foreign_files(root, made) == ["stray"]
    quick = verify.quick(root, made, seen)
    # content that changed under the same size, time and inode is what the full one is for
    assert set(quick.damaged) == {"short"} and quick.missing == ["gone"]
    os.utime(root / "rot")
    assert "mtime_ns changed" in verify.quick(root, made, seen).damaged["rot"]
    copy = root / "config.json.new"
    copy.write_bytes(FILES["config.json"])
    os.utime(copy, ns=(0, (root / "config.json").stat().st_mtime_ns))
    copy.replace(root / "config.json")
    assert "inode changed" in verify.quick(root, made, seen).damaged["config.json"]


def test_links_to_files_are_followed_and_links_to_directories_are_not(tmp_path: Path) -> None:
    blobs = tree(tmp_path / "blobs", {"b1": b"weights"})
    root = tree(tmp_path / "snapshot", {"config.json": b"{}"})
    (root / "model.safetensors").symlink_to(blobs / "b1")
    made, seen = verify.manifest_of(root, "m")
    assert "model.safetensors" in made.by_path and verify.quick(root, made, seen).complete
    (root / "linked").symlink_to(blobs)
    with pytest.raises(RigctlError, match="not a plain file"):
        verify.manifest_of(root, "m")
    assert verify.foreign_files(root, made) == ["linked"]


def test_verification_stops_when_told(tmp_path: Path) -> None:
    root = tree(tmp_path / "m", FILES)
    made, _ = verify.manifest_of(root, "m")
    stop = threading.Event()
    stop.set()
    with pytest.raises(verify.Cancelled):
        verify.full(root, made, stop=stop)


def test_records_are_read_back_and_broken_ones_are_named(tmp_path: Path) -> None:
    state = record.State(tmp_path)
    made, seen = verify.manifest_of(tree(tmp_path / "m", FILES), "m")
    kept = record.Record("one", str(tmp_path / "m"), "adopted", made, seen, 1.0, 2.0)
    state.save(kept)
    assert state.load("one") == kept and state.names() == ["one"]
    state.record_path("two").write_text("{}")
    with pytest.raises(RigctlError, match="not a record of this program"):
        state.load("two")
    state.record_path("two").write_text("{")
    with pytest.raises(RigctlError, match="cannot be read"):
        state.load("two")
    with pytest.raises(RigctlError, match="use a-z"):
        state.load("../escape")


SPEC: dict[str, Any] = {
    "name": "kimi",
    "destination": "/shared/kimi",
    "format": 1,
    "source": {"kind": "hub", "repository": "lab/model", "revision": "a" * 40},
}


def test_spec_is_typed(tmp_path: Path) -> None:
    parsed = CheckpointJob.parse(SPEC, "here")
    assert isinstance(parsed.source, HubSource) and parsed.workers == 8
    (tmp_path / "s.json").write_text(json.dumps({**SPEC, "stall": 3}))
    assert CheckpointJob.read(tmp_path / "s.json").stall == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nmae": "x"}, 'here: nmae: there is no such key, did you mean "name"'),
        ({"name": "A/B"}, "here: name: "),
        ({"destination": "relative"}, "absolute"),
        ({"destination": "/"}, "absolute"),
        ({"destination": "/a/../b"}, "or '..'"),
        ({"workers": "8"}, "here: workers: Input should be a valid integer"),
        ({"workers": True}, "here: workers: Input should be a valid integer"),
        ({"workers": 0}, "here: workers: Input should be greater than or equal to 1"),
        ({"bandwidth_limit": 0}, "bandwidth_limit"),
        ({"role": "model"}, "here: role: Input should be 'target' or 'drafter'"),
        ({"source": {**SPEC["source"], "include": "*.json"}}, "here: source.include: Input should be a valid list"),
        ({"source": {"kind": "ftp"}}, "here: source: .*'hub', 'http'"),
        ({"source": {"kind": "hub"}}, "here: source.repository: is missing"),
        ({"source": {**SPEC["source"], "revision": "main"}}, "moving name"),
        ({"source": {**SPEC["source"], "repository": "model"}}, "source.repository: a repository is OWNER/NAME"),
        ({"source": {**SPEC["source"], "endpoint": "hub.example"}}, "source.endpoint: an address begins with http"),
        ({"token": "hf_abc"}, "here: token: "),
        ({"source": {"kind": "rsync", "host": "-oProxyCommand=x", "path": "/m"}}, "source.host: neither an IP"),
        ({"source": {"kind": "local", "path": "models"}}, "absolute"),
    ],
)
def test_wrong_specs_are_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RigctlError, match=message):
        CheckpointJob.parse({**SPEC, **change}, "here")


def test_sink_never_grows_past_its_manifest_and_resumes(tmp_path: Path) -> None:
    data = os.urandom(1000)
    (tmp_path / "whole").write_bytes(data)
    digest, _ = verify.hash_file(tmp_path / "whole", FileHasher("sha256", 0))
    entry = File(path="f", size=1000, sha256=digest.removeprefix("sha256:"))
    progress, stop = Progress("x"), threading.Event()
    part = tmp_path / "part"
    with Sink(part, entry, progress, Limiter(None), stop) as sink:
        sink.write(data[:600])
        with pytest.raises(SourceWrong, match="more than the 1000 bytes"):
            sink.write(data[:401])
        with pytest.raises(SourceWrong, match="ends at byte 600"):
            sink.finish()
    with Sink(part, entry, progress, Limiter(None), stop) as sink:
        assert sink.offset == 600
        sink.write(data[600:])
        assert sink.finish() == entry.digest()
    assert progress.fetched == 1000
    part.write_bytes(data + b"more")
    with Sink(part, entry, progress, Limiter(None), stop) as sink:
        assert sink.offset == 0


def test_progress_tells_rate_and_remaining(tmp_path: Path) -> None:
    progress = Progress("kimi", total=1000, files_total=2)
    with Reporter(progress, tmp_path / "job.json", as_json=False, every=0.02):
        progress.file_starts("a", 600)
        progress.advance(400)
        progress.event("something")
    status = json.loads((tmp_path / "job.json").read_text())
    assert status["bytes_done"] == 400 and status["files"] == ["a"]
    status.update(rate=100, remaining_seconds=6)
    assert line(status) == "kimi: plan 400 B of 1.0 kB (40.0 %), 100 B/s, 6 s left, 0/2 files, a"
    assert human_bytes(595.2e9) == "595.2 GB" and human_seconds(7265) == "2 h 01 min"


def test_command_without_records_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIGCTL_CHECKPOINTS", str(tmp_path))
    assert main(["checkpoints", "status"]) == 0
    assert main(["checkpoints", "verify"]) == 1
    assert main(["checkpoints", "verify", "absent"]) == 1
    assert "stage or adopt it first" in capsys.readouterr().err


def test_quick_report_keeps_what_the_last_full_one_found(tmp_path: Path) -> None:
    root = tree(tmp_path / "m", FILES)
    made, seen = verify.manifest_of(root, "m")
    kept = record.Record("one", str(root), "adopted", made, seen, 1.0, 2.0, damaged={"config.json": "rot"})
    assert record.quick_report(kept).damaged == {"config.json": "rot"}


def test_identity_depends_on_content_only() -> None:
    entry = File(path="a", size=1, sha256="0" * 64)
    assert Manifest.listed("x", "r1", [entry]).identity() == Manifest.listed("y", None, [entry]).identity()
