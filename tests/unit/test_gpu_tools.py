"""What runs on a borrowed GPU machine, as far as it can be tried without one: wheels made smaller, locks, the table."""

from __future__ import annotations

import argparse
import base64
import getpass
import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import requests

from rig.artifacts.templates import systemd_assignment, systemd_quote
from rigctl.engines.drift import read_lock
from tests.gpu import fatbin, run, standin_systemd, wheels
from tests.unit.serving import specification


def entry(arch: int, data: bytes, *, compressed: int = 0) -> bytes:
    header = struct.pack("<HHIQIIHHI", 2, 0x101, 64, len(data), compressed, 0, 0, 0, arch)
    return header.ljust(64, b"\0") + data


def fatbinary(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def test_only_what_is_kept_keeps_its_bytes_and_place() -> None:
    name = b"FlashAttnFwdSm90INS1_25CollectiveMainloopELi%sENS_%s"
    wanted, half, wide = (
        name % what for what in ((b"512", b"10bfloat16_t"), (b"512", b"6half_t"), (b"96", b"10bfloat16_t"))
    )
    parts = [entry(80, b"old" * 8), entry(90, wanted), entry(120, b"new" * 8), entry(90, wide)]
    other = fatbinary(entry(90, half), entry(90, b"plain" * 8))
    library = bytearray(b"front" + fatbinary(*parts) + bytes(8) + other + b"back")
    size = len(library) - len(b"front") - len(b"back")
    before = bytes(library)
    assert fatbin.trim(library, len(b"front"), size, fatbin.for_hopper) == (4, 2)
    assert len(library) == len(before)
    left = [one for one in fatbin.entries(library, 5, size) if one.arch == 90]
    kept = [bytes(library[one.at + one.header_size :][: one.data_size]) for one in left]
    assert kept == [wanted, b"plain" * 8]
    assert b"old" not in library
    assert b"half_t" not in library
    assert library.startswith(b"front")
    assert library.endswith(b"back")


def test_large_compressed_code_is_left_out() -> None:
    large = fatbin.Entry(0, 64, 2 << 20, compressed=True, arch=90)
    assert not fatbin.for_hopper(large, b"")
    assert fatbin.for_hopper(fatbin.Entry(0, 64, 1000, compressed=True, arch=90), b"")


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond its section"):
        list(fatbin.entries(fatbinary(entry(90, b"x" * 8)), 0, 80))
    broken = bytearray(fatbinary(entry(90, b"x" * 8)))
    struct.pack_into("<Q", broken, 16 + 8, 1 << 40)
    with pytest.raises(ValueError, match="not laid out as known"):
        list(fatbin.entries(broken, 0, len(broken)))


def recorded(wheel: Path) -> dict[str, tuple[bytes, str]]:
    """Name -> content and recorded hash of every member."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith("RECORD"))
        rows = [line.split(",") for line in archive.read(record).decode().splitlines()]
        return {name: (archive.read(name), digest) for name, digest, _ in rows if not name.endswith("RECORD")}


def proved(wheel: Path) -> bool:
    return all(
        digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for data, digest in recorded(wheel).values()
    )


def test_a_trimmed_wheel_says_so_and_its_record_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = fatbinary(entry(80, b"o" * 64), entry(90, b"bfloat16_t" * 8))
    files = {"k/ops.abi3.so": library, "k/__init__.py": b"x = 1\n", "k-1.dist-info/METADATA": b"Name: k\n"}
    rows = [f"{name},sha256={'A' * 43},{len(data)}" for name, data in files.items()]
    source, target = tmp_path / "k-1-py3-none-any.whl", tmp_path / "trimmed.whl"
    with zipfile.ZipFile(source, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
        rows[1] = f"k/__init__.py,sha256={digest},6"
        wheel.writestr("k-1.dist-info/RECORD", "\n".join([*rows, "k-1.dist-info/RECORD,,"]) + "\n")
    monkeypatch.setattr(fatbin, "section", lambda path: (0, path.stat().st_size))
    said = fatbin.trimmed_wheel(source, target)
    assert said == ["k/ops.abi3.so: 1 pieces of GPU code emptied, 1 kept"]
    without = tmp_path / "without.whl"
    assert fatbin.trimmed_wheel(source, without, left_out=["k/ops.abi3.so"]) == ["k/ops.abi3.so: left out"]
    assert proved(without)
    assert "k/ops.abi3.so" not in recorded(without)
    assert proved(target)
    content = {name: data for name, (data, _) in recorded(target).items()}
    assert content["k-1.dist-info/METADATA"].startswith(b"Changed: not the published wheel; k/ops.abi3.so: 1 pieces")
    assert content["k/__init__.py"] == b"x = 1\n"
    assert b"oooo" not in content["k/ops.abi3.so"]


def test_the_lock_of_the_machine_has_the_hashes_of_what_is_carried(tmp_path: Path) -> None:
    torch = wheels.pointer_wheel("2.11.0", tmp_path)
    assert proved(torch)
    lock = "# made\n" + "".join(
        f"{name}==1 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n    # via x\n"
        for name in ("requests", "torch", "triton")
    )
    derived = wheels.derived_lock(lock, {"requests": tmp_path / "r.whl", "torch": torch}, ["From the machine: triton."])
    assert derived.startswith("# From the machine: triton.\n")
    assert read_lock(derived) == {"requests": "1", "torch": "1"}
    assert wheels.digest(torch) in derived
    assert derived.count("0" * 64) == 1


def test_portions_are_whole_wheels_wherever_there_is_room(tmp_path: Path) -> None:
    paths = []
    for number, size in enumerate((40, 90, 30, 30)):
        paths.append(tmp_path / f"{number}.whl")
        paths[-1].write_bytes(bytes(size))
    assert wheels.portions(paths, 70) == [[paths[0], paths[2]], [paths[1]], [paths[3]]]


@pytest.mark.parametrize(("cards", "tp", "sizes"), [(1, 1, [1] * 8), (2, 1, [2] * 4), (2, 2, [1] * 8), (8, 2, [4, 4])])
def test_lives_that_go_on_at_once_have_cards_of_their_own(cards: int, tp: int, sizes: list[int]) -> None:
    sglang = [entry for entry in run.DRAFTS if entry.startswith("sglang")]
    groups = run.groups(sglang, cards, tp)
    assert [len(group) for group in groups] == sizes
    for group in groups:
        used = [gpu for variant in group for gpu in variant.gpus]
        assert len(used) == len(set(used)) == len(group) * tp
        assert max(used) < cards
    assert {variant.attention for group in groups for variant in group} == {"triton", None}
    assert len({variant.name for group in groups for variant in group}) == 8 or (cards, tp) == (8, 2)
    assert [one.attention for group in run.groups(["vllm-base"], cards, tp) for one in group] == [None, "TRITON_MLA"]


def test_vllm_counts_what_is_accepted_beyond_the_end_and_sglang_does_not() -> None:
    counted = {
        engine: run.counters(run.Variant(f"{engine}-eagle3-custom-current", (0,), None)) for engine in run.RELEASES
    }
    assert counted == {"vllm": [34, 102, 51], "sglang": [34, 102, 50]}


def test_the_acceptance_length_is_the_one_that_was_measured() -> None:
    """1.0 and 4.0 in every cell of the runs on H200, but 3.984 with SGLang and answers of 256 tokens."""
    names = ["sglang-always-triton-tp1-g0, 32", "vllm-always-default-tp1-g0, 1", "sglang-never-x", "vllm-half-x"]
    assert [run.acceptance_length(name, 85) for name in names] == [4.0, 4.0, 1.0, None]
    assert [run.acceptance_length(name, 256) for name in names[:2]] == [255 / 64, 4.0]


def test_the_page_shows_vllm_s_run_as_it_was() -> None:
    page = (run.ROOT / "docs/lab/gpu.md").read_text()
    recorded = json.loads((run.ROOT / "tests/fixtures/gpu/h200-vllm.json").read_text())
    assert "\n".join(run.rows(recorded)) in page


def test_the_table_has_lives_and_switches_and_no_other_answers() -> None:
    life = {"start": {"seconds": 9}, "ask": {"counted": [1, 3, 3], "length": 4.0}, "stop": {"seconds": 1, "mib": [0]}}
    switch = {"start": {"seconds": 5, "cold": True, "answers_after": 4.5}, "ask": {}, "mib": [900]}
    results = {
        "machine": {"date": "today"},
        "lives": {"outcome": "ok", "found": {"vllm-base": life, "worker": {"again": {"text": True}}, "processes": []}},
        "faults": {"outcome": "failed", "why": "Wrong: text", "found": {"ask": {}, "switch to b": switch}},
    }
    lines = run.rows(results)
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| vllm-base",
        "| switch to b",
        "faults failed: Wrong: text",
    ]
    assert "| 4.5 / 5 | cold | ? / 900 / ? |" in lines[3]
    assert lines[2].count("|") == lines[0].count("|")


def test_a_life_is_validated_by_text_counters_and_what_is_left() -> None:
    good: dict[str, Any] = {
        "ask": {"text": True, "counted": [21, 63, 63], "predicted": [21, 63, 63]},
        "stop": {"mib": [4]},
    }
    run.validate(good)
    for change, message in (
        ({"ask": {**good["ask"], "text": False}}, "not the model's"),
        ({"ask": {**good["ask"], "counted": [21, 63, 60]}}, "predicted"),
        ({"stop": {"mib": [20000]}}, "still on the cards"),
        ({"error": "Wrong: not accepted"}, "not accepted"),
    ):
        with pytest.raises(run.Wrong, match=message):
            run.validate({**good, **change})


def test_the_stand_in_reads_our_units_as_systemd_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin_systemd, "UNITS", tmp_path)
    text = "\n".join(
        [
            "# Written by kimi-rig",
            "[Service]",
            "Type=notify",
            "ExecStart=/opt/rigctl serve /etc/a.json -- python " + systemd_quote('{"a": "50%", "b": "$x"}'),
            "Environment=" + systemd_assignment("NAME", "a value of 5%"),
            "RestartPreventExitStatus=78 200",
        ]
    )
    (tmp_path / "kimi-a.service").write_text(text)
    found = dict(standin_systemd.unit_text("kimi-a.service"))
    assert standin_systemd.words(found["ExecStart"])[-2:] == ["python", '{"a": "50%", "b": "$x"}']
    assert standin_systemd.words(found["Environment"]) == ["NAME=a value of 5%"]
    (tmp_path / "kimi-b@.service").write_text("ExecStart=/opt/rigctl fallback %i\n")
    assert dict(standin_systemd.unit_text("kimi-b@c.service"))["ExecStart"] == "/opt/rigctl fallback c"


def test_the_stand_in_runs_a_builder_as_its_user_and_gives_back_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(standin_systemd, "STATE", tmp_path)
    variables = tmp_path / "variables"
    variables.write_text('A="x \\"y\\" \\$z"\nPATH="/usr/bin:/bin"\n')
    options = [f"--property=EnvironmentFile={variables}", f"--property=User={getpass.getuser()}"]
    code = standin_systemd.systemd_run(["--wait", "--pipe", *options, "--", "sh", "-c", 'echo "$$A"; exit 7'])
    assert (code, capfd.readouterr().out) == (7, 'x "y" $z\n')


def test_an_answer_that_fails_ends_no_round_and_what_came_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, _: Any) -> None: ...

        def completion(self, question: str, **_: Any) -> None:
            if question.endswith(" 5"):
                raise requests.ConnectionError("closed")
            if question.endswith("7"):
                response = requests.Response()
                response.status_code, response._content = 500, b"Already borrowed"
                raise requests.HTTPError(response=response)

    monkeypatch.setattr(run, "Engine", Refusing)
    failures: list[str] = []
    assert run.answers_a_second(specification(), failures) > 0
    assert sorted(set(failures)) == ["500 Already borrowed", "ConnectionError: closed"]
    assert len(failures) == 52


def test_the_log_around_an_error_is_kept_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin_systemd, "STATE", tmp_path)
    lines = [f"line {number}" for number in range(400)]
    lines[100] = "Traceback (most recent call last):"
    (tmp_path / "kimi-a.service.log").write_text("\n".join(lines))
    assert run.told_errors("a") == [*lines[97:130], "...", *lines[-20:]]
    assert run.told_errors("none") == ["..."]


def test_a_stopped_reader_leaves_room_for_what_an_engine_says() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE) as reader:
        assert reader.stdin
        writer = reader.stdin.fileno()
        with run.wide_pipes(reader.pid) as unread:
            os.set_blocking(writer, False)
            assert os.write(writer, bytes(500_000)) == 500_000
            assert unread() == 500_000
        reader.kill()
        os.set_blocking(writer, True)


def test_a_switch_says_how_long_nobody_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, True, False, False, False, True]

    def get(url: str, timeout: float) -> requests.Response:
        response = requests.Response()
        response.status_code = 200 if not answers or answers.pop(0) else 503
        return response

    program = tmp_path / "rigctl"
    program.write_text('#!/bin/sh\necho "$@"\nsleep 0.6\nexit $CODE\n')
    program.chmod(0o755)
    monkeypatch.setattr(run.layout, "RIGCTL", str(program))
    monkeypatch.setattr(run, "named", lambda name: specification())
    monkeypatch.setattr(run.requests, "get", get)
    monkeypatch.setenv("CODE", "0")
    found = run.switched(run.Variant("vllm-base", (0,), None), ["--warm"])
    assert [line for _, line in found["said"]] == ["switch --warm vllm-base-default-tp1-g0"]
    assert 0.4 <= found["nobody_answered_seconds"] <= found["seconds"]
    monkeypatch.setenv("CODE", "3")
    with pytest.raises(run.Wrong, match="exit code 3"):
        run.switched(run.Variant("vllm-base", (0,), None), [])


def test_a_program_is_a_step_with_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "WORK", tmp_path)
    folder = tmp_path / "tests/gpu"
    folder.mkdir(parents=True)
    found: dict[str, Any] = {}
    with pytest.raises(run.Wrong, match="is not there"):
        run.program("train")(argparse.Namespace(standin=False), found)
    text = "import json, pathlib, sys\nprint('said')\nout = pathlib.Path(sys.argv[1])\nout.mkdir(exist_ok=True)\n"
    text += "(out / 'train.json').write_text(json.dumps({'length': 3.9, 'args': sys.argv[2:]}))\n"
    (folder / "train.py").write_text(text)
    run.program("train")(argparse.Namespace(standin=True), found)
    assert found == {"length": 3.9, "args": ["--cpu"]}
    (folder / "train.py").write_text(text + "sys.exit(4)\n")
    with pytest.raises(run.Wrong, match="exit code 4: said"):
        run.program("train")(argparse.Namespace(standin=False), found)
