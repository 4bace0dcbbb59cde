"""rigctl switch, fallback, free, doctor and status, with systemd and /proc replaced."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rigctl.cli import main
from rigctl.contract import layout
from rigctl.errors import RigctlError
from rigctl.services import doctor, leftovers, status, switching
from rigctl.supervisor.ended import boot_id, failures, record
from rigctl.supervisor.specification import Specification, installed, named
from tests.unit.serving import fields


class Host:
    """Directories of a host, and systemctl's answers."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.units: dict[str, dict[str, str]] = {}
        self.started: list[tuple[str, ...]] = []
        places = {name: root / name.lower() for name in ("CONFIGURATIONS", "RUNTIME", "SERVING", "LOGS")}
        for name, path in places.items():
            path.mkdir()
            monkeypatch.setattr(layout, name, str(path))
        self.fallback = places["SERVING"] / "fallback.json"
        for module in (status, switching):
            monkeypatch.setattr(module, "properties", self.properties)
        monkeypatch.setattr(switching, "systemctl", lambda *words: self.started.append(words))
        monkeypatch.setattr(status, "UNITS", root)

    def properties(self, unit: str, wanted: list[str]) -> dict[str, str]:
        return {key: self.units.get(unit, {}).get(key, "") for key in wanted}

    def add(self, name: str, **more: Any) -> Specification:
        path = Path(layout.specification_path(name))
        path.write_text(json.dumps(fields(**{"name": name, "port": 9, **more})))
        for directory in (layout.RUNTIME, layout.SERVING, layout.LOGS):
            Path(directory, name).mkdir(exist_ok=True)
        self.units[f"kimi-{name}.service"] = {"ActiveState": "inactive"}
        return named(name)

    def write(self, name: str, file: str, **content: Any) -> None:
        Path(layout.SERVING, name, file).write_text(json.dumps(content))

    def runs(self, name: str, **more: Any) -> None:
        content = {"digest": "d" * 64, "accepted_at": 1, "accepted_monotonic": time.monotonic(), "proved": {}, **more}
        Path(layout.RUNTIME, name, "started.json").write_text(json.dumps(content))
        self.units[f"kimi-{name}.service"] = {"ActiveState": "active", "StatusText": "serving"}

    def ended(self, name: str, ago: float = 0, jump: float = 0, boot: str | None = None, **more: Any) -> None:
        """It ended so many seconds ago; jump: what the wall clock, which anyone may set, says beside."""
        since_boot = [boot or boot_id(), time.monotonic() - ago]
        self.write(name, "ended.json", at=time.time() - ago + jump, since_boot=since_boot, **more)

    def starts(self, name: str) -> None:
        """It has just been started."""
        self.units[f"kimi-{name}.service"]["InactiveExitTimestampMonotonic"] = str(int(time.monotonic() * 1e6))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def fall_back(name: str) -> int:
    return main(["fallback", name])


def test_a_start_that_is_not_accepted_goes_back_to_what_it_displaced(host: Host) -> None:
    for name, accepted, stopped in (("old", 100, 0.5), ("older", 90, 0.7), ("long-gone", 200, 60)):
        host.add(name, gpus=[0])
        host.write(name, "accepted.json", at=accepted)
        host.ended(name, stopped)
    host.add("new")
    host.starts("new")
    host.ended("new", cause="not accepted: x", accepted=False)
    assert fall_back("new") == 0
    assert host.started == [("start", "--no-block", "kimi-old.service")]
    shown = json.loads(host.fallback.read_text())
    assert (shown["failed"], shown["to"], shown["cause"]) == ("new", ["old"], "not accepted: x")
    # Once: when that one is not accepted either, nothing is started any more, and that is reported.
    host.starts("old")
    host.ended("old", cause="not accepted: y", accepted=False)
    host.write("new", "accepted.json", at=50)
    assert fall_back("old") == 0
    assert len(host.started) == 1
    assert "it stays down" in json.loads(host.fallback.read_text())["outcome"]


def test_all_that_was_displaced_comes_back(host: Host) -> None:
    for name, port, gpus in (("a", 1, [0, 1]), ("b", 2, [2, 3]), ("c", 3, [0, 1, 2, 3]), ("like-a", 4, [1])):
        host.add(name, port=port, gpus=gpus)
    for name, accepted in (("a", 300), ("b", 100), ("like-a", 200)):
        host.write(name, "accepted.json", at=accepted)
        host.ended(name, 0.5)
    host.starts("c")
    host.ended("c", cause="not accepted: x", accepted=False)
    assert fall_back("c") == 0
    assert host.started == [("start", "--no-block", "kimi-a.service", "kimi-b.service")]
    record = json.loads(host.fallback.read_text())
    assert record["outcome"] == "a and b are started again"
    host.write("c", "accepted.json", at=50)
    for name in ("a", "b"):  # neither brings back what it displaced
        host.starts(name)
        host.ended(name, cause="y", accepted=False)
        assert fall_back(name) == 0
        assert f"{name}, to which it had gone back, is not accepted" in host.fallback.read_text()
    assert len(host.started) == 1


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (["activating", "active"], "was started meanwhile"),
        (["deactivating", "inactive"], "does not run (inactive)"),
        (["activating", "failed"], "does not run (failed)"),
    ],
)
def test_a_restart_during_a_restart_waits(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: list[str], says: str
) -> None:
    host.add("a")
    host.runs("a")
    states = iter(state)
    monkeypatch.setattr(switching, "properties", lambda *_: {"ActiveState": next(states)})
    monkeypatch.setattr(switching, "IDLE_POLL_SECONDS", 0)
    assert main(["restart", "a"]) == 0
    shown = capsys.readouterr().out
    assert f"a is {state[0]}: waiting" in shown and says in shown
    assert host.started == []


def test_a_frozen_engine_is_restarted_without_being_asked(host: Host) -> None:
    host.add("a")
    host.runs("a")
    assert main(["restart", "a"]) == 0
    assert host.started == [("restart", "kimi-a.service")]


@pytest.mark.parametrize(
    ("jump", "boot", "back"), [(-86400, None, True), (86400, None, True), (0, "the boot before", False)]
)
def test_a_clock_that_jumps_hides_nothing(host: Host, jump: float, boot: str | None, back: bool) -> None:
    host.add("old")
    host.write("old", "accepted.json", at=100)
    host.ended("old", 1, jump=jump, boot=boot)
    host.add("new")
    host.starts("new")
    host.ended("new", cause="not accepted: x", accepted=False)
    assert fall_back("new") == 0
    assert bool(host.started) is back


def test_no_fallback_without_a_switch_or_after_a_crash_in_service(host: Host) -> None:
    for name in ("a", "b"):
        host.add(name)
        host.write(name, "accepted.json", at=100)
    host.ended("a", 3600)
    host.starts("b")
    host.ended("b", cause="x", accepted=False)
    assert fall_back("b") == 0
    host.ended("a", 1)
    host.ended("b", cause="crash loop", accepted=True)
    assert fall_back("b") == 0
    assert host.started == []


def test_the_end_of_a_run_is_written_down(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = host.add("a")
    host.runs("a")
    monkeypatch.setenv("SERVICE_RESULT", "signal")
    monkeypatch.setenv("EXIT_CODE", "killed")
    monkeypatch.setenv("EXIT_STATUS", "KILL")
    assert record(spec) == 0
    assert "the supervisor ended by itself (killed, KILL: by hand, or by the kernel for lack" in failures(spec)[0]
    assert not Path(str(spec.runtime), "started.json").exists()
    # A long healthy run forgets the crashes before it; a stop forgets all.
    host.runs("a", accepted_monotonic=time.monotonic() - 3 * 3600)
    monkeypatch.setenv("SERVICE_RESULT", "oom-kill")
    record(spec)
    assert failures(spec) == ["the kernel ended it for lack of memory"]
    monkeypatch.setenv("SERVICE_RESULT", "success")
    record(spec)
    assert failures(spec) == []


def test_status_tells_what_an_operator_must_know(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.add("runs")
    host.runs(
        "runs",
        digest="other",
        release="older",
        proved={"routes": {"open_without_key": ["GET /metrics (tells its counters)"]}},
    )
    watch: dict[str, Any] = {"below_floor": True, "acceptance_length": 1.1, "acceptance_floor": 1.25, "own_rate": 0.25}
    watch["own_rate_is"] = "with bonus"
    Path(layout.RUNTIME, "runs", "watch.json").write_text(json.dumps(watch))
    host.add("key")
    host.units["kimi-key.service"] = {"ActiveState": "failed", "ExecMainStatus": "243"}
    host.add("crashed")
    host.units["kimi-crashed.service"] = {"ActiveState": "failed", "Result": "exit-code"}
    host.write("crashed", "ended.json", at=1, cause="no progress", last_words=["CUDA error"], left=["GPU 3 holds"])
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "STALE: deployed anew since it was started (runs older, deployed is stand-in)",
        "EDITED BY HAND",
        "1.1 is below 1.25",
        "own rate 0.25 is with bonus",
        "open without the API key: GET /metrics",
        "a credential is missing or unreadable",
        "no progress",
        "| CUDA error",
        "GPU 3 holds",
    ):
        assert part in shown
    assert main(["status", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["runs"]["release"], rows["runs"]["running_release"]) == ("stand-in", "older")
    assert rows["runs"]["stale"] and rows["crashed"]["last_end"]["cause"] == "no progress"


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ('{"format": 9}', "format 9 is newer"), ('{"format": 2}', "b.json: name: is missing")],
)
def test_one_damaged_specification_hides_no_other(
    host: Host, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    for name in ("a", "b", "c"):
        host.add(name)
    Path(layout.specification_path("b")).write_text(text)
    assert main(["status", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert [*rows] == ["a", "b", "c"]
    assert says in rows["b"]["status"] and rows["b"]["digest"] is None and not rows["b"]["stale"]
    assert main(["status"]) == 0
    assert says in capsys.readouterr().out
    assert [found.name for found in installed()] == ["a", "c"]
    with pytest.raises(RigctlError, match=says):
        named("b")


def test_a_switch_goes_on_while_systemd_is_replaced(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """systemctl loses its connection, and for a moment nobody answers: daemon-reexec, as an upgrade does."""
    host.add("a")
    answers = ["activating", None, "activating", "active"]

    def properties(unit: str, wanted: list[str]) -> dict[str, str]:
        state = answers.pop(0) if answers else "active"
        if state is None:
            raise RigctlError("systemctl show: Connection refused")
        return {"ActiveState": state, "StatusText": f"loading weights {len(answers)}"} if "StatusText" in wanted else {}

    cut = [sys.executable, "-c", "import time; time.sleep(0.2); exit('Warning! D-Bus connection terminated.')"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **more: popen(cut, **more))
    monkeypatch.setattr(switching, "properties", properties)
    monkeypatch.setattr(switching.time, "sleep", lambda _: time.monotonic())
    host.runs("a")
    assert main(["switch", "a"]) == 0
    assert "a serves on " in capsys.readouterr().out


def test_a_configuration_that_is_not_there(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.add("vllm-base")
    assert main(["switch", "vllm-bse"]) == 1
    assert 'there is no configuration vllm-bse on this host, did you mean "vllm-base"?' in capsys.readouterr().err


@pytest.fixture
def orphan() -> Any:
    """A process named as SGLang names its workers."""
    # prctl(PR_SET_NAME), as setproctitle does.
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'sglang::scheduler_TP0'); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--host", "0.0.0.0", "--port", "8123"], "0.0.0.0:8123"),
        (["--host", "localhost", "--port", "many"], "127.0.0.1:9"),
        (["--host", "kimi-1.example.com", "--port", "8123"], "127.0.0.1:9"),
        (["--port"], "127.0.0.1:9"),
    ],
)
def test_an_engine_is_asked_where_it_runs_until_it_is_started_anew(host: Host, words: list[str], address: str) -> None:
    """A deploy may have moved it; what its unit says is where it will be."""
    specification = host.add("new")
    assert status.as_running(specification).endpoint.address == "127.0.0.1:9"
    wait = "print('there', flush=True); import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", wait, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        host.units["kimi-new.service"] = {"MainPID": str(process.pid)}
        assert status.as_running(specification).endpoint.address == address
        process.kill()


def test_free_names_orphans_and_ends_only_what_it_was_told_to(
    orphan: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "installed", lambda: [])
    found = {holder.pid: holder for holder in leftovers.holders()}
    assert found[orphan.pid].engine and "sglang::scheduler_TP0" in found[orphan.pid].command
    assert found[orphan.pid].owner and orphan.poll() is None
    monkeypatch.setattr(leftovers, "SEGMENTS", ("drill_*",))
    (tmp_path / "drill_used").write_bytes(b"x")
    (tmp_path / "drill_unused").write_bytes(b"x")
    with (tmp_path / "drill_used").open("rb"):
        assert leftovers.unused_segments(tmp_path) == [tmp_path / "drill_unused"]
    leftovers.end([orphan.pid])
    assert not psutil.pid_exists(orphan.pid)


def test_free_names_whose_connection_was_given_our_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there, and yet nobody else can (sgl-project/sglang#37215)."""
    code = "import socket; s = socket.create_connection(('127.0.0.1', %d)); print(s.getsockname()[1], flush=True); "
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", f"{code % server.getsockname()[1]}input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            specification: Any = SimpleNamespace(endpoints=[SimpleNamespace(port=port)])
            monkeypatch.setattr(leftovers, "installed", lambda: [specification])
            held = {holder.pid: holder for holder in leftovers.holders()}
            process.communicate()
    assert held[process.pid].holds == [f"port {port} of a connection"] and not held[process.pid].engine


@pytest.mark.parametrize("words", ["vim /opt/vllm/README.md", "rsync -a /data/vllm/ /backup", "sglang.launch_server"])
def test_free_ends_nobody_for_words_of_a_command_line(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "installed", lambda: [])
    for program in (["sleep"], [sys.executable, "-c", "import time; time.sleep(60)"]):
        # The words of a process, whatever it executes.
        with subprocess.Popen([*words.split(), *program[1:], "60"], executable=program[0]) as process:
            found = {holder.pid: holder for holder in leftovers.holders()}
            process.kill()
        assert process.pid not in found


def test_free_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["free"]) == 1
    assert "only root" in capsys.readouterr().err


SECRETS = """
Authorization: Bearer abcdefghij123
{"api_key": "qwertz", "token": null}
HF_TOKEN=hf_abcdefghijklmnopqrstuv
proxy http://user:hunter2@proxy:3128
--api-key hemlig
the known one: s3cret-s3cret
"""


def test_doctor_masks_secrets_and_packs_logs(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "api-key").write_text("s3cret-s3cret\n")
    monkeypatch.setattr(doctor, "CREDENTIAL", credentials / "api-key")
    monkeypatch.setattr(doctor, "COMMANDS", {"missing.txt": ["no-such-program"]})
    host.add("a")
    Path(layout.LOGS, "a", "2026.log").write_text(SECRETS)
    output = tmp_path / "bundle.tar.gz"
    assert main(["doctor", "--output", str(output)]) == 0
    assert output.stat().st_mode & 0o777 == 0o600
    with tarfile.open(output) as archive:
        texts = {m.name: (archive.extractfile(m) or pytest.fail()).read().decode() for m in archive.getmembers()}
    log = texts["kimi-rig-doctor/a/2026.log"]
    for secret in ("abcdefghij123", "qwertz", "hf_abc", "hunter2", "hemlig", "s3cret"):
        assert secret not in log, secret
    assert '"token": null' in log and "kimi-rig-doctor/missing.txt" in texts
    assert main(["doctor", "--output", str(output)]) == 1, "an existing file is not overwritten"
    assert "cannot be written" in capsys.readouterr().err
