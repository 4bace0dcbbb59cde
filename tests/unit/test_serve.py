"""The supervisor as a process, with a stand-in engine and a socket in systemd's place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.serving import EAGLE3, Run, limits

pytestmark = pytest.mark.slow

WEIGHTS = [["log", f"Loading safetensors checkpoint shards: {n}0% | {n}/64 [00:01"] for n in (1, 2)]
FAST = {"watch_seconds": 0.2, "watch_answer_seconds": 0.5, "sample_seconds": 0.1}


def test_ready_means_accepted_and_a_stop_is_clean(tmp_path: Path) -> None:
    noise = [["log", "ImportError: cannot import name 'SparseMatrix'"], ["sleep", 0.3]]
    run = Run(tmp_path, {"load": [*WEIGHTS, *noise]}, limits=limits(**FAST))
    assert "loading weights 2/64" in run.until("loading weights 2/64")
    run.until("READY=1")
    started = run.json("started.json")
    listening = float(run.journal.partition("LISTENING ")[2].split()[0])
    assert 0 <= started["noticed_at"] - listening < 0.5
    assert {"identity", "completion", "tool_call", "speculation"} <= started["proved"].keys()
    assert started["checkpoints"].keys() == {"target"}
    assert started["prechecks"]["host settings live"] == "0 settings are live"
    assert "<7>[harmless] ImportError" in run.journal
    run.until("serving; answered")
    assert run.json("watch.json")["errors"] == []
    for place in ("metrics/drill.prom", "metrics.prom"):
        assert 'kimi_acceptance_below_floor{configuration="drill"} 0.0' in (tmp_path / "run" / place).read_text()
    # What a node exporter's pattern matches is directories alone, and open to its user.
    matched = list(tmp_path.glob("*/metrics"))
    assert matched == [tmp_path / "run" / "metrics"]
    assert matched[0].stat().st_mode & 0o7777 == 0o755
    assert run.stop() == 0
    [log] = (tmp_path / "logs").glob("*.log")
    assert "[harmless] ImportError" in log.read_text()
    assert json.loads((tmp_path / "state" / "accepted.json").read_text())["digest"] == "d" * 64


def test_an_engine_that_answers_badly_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text(json.dumps({"answer": "degenerate"}))
    run = Run(tmp_path)
    # 78: another try would end the same, so systemd makes none and the unit is failed at once.
    assert run.end() == 78
    assert run.json("cause.json")["cause"].startswith("not accepted: completion: content is degenerate")
    assert not (tmp_path / "run" / "started.json").exists()


def test_an_engine_that_dies_while_loading_leaves_its_last_words(tmp_path: Path) -> None:
    run = Run(tmp_path, {"load": [*WEIGHTS, ["log", "torch.OutOfMemoryError: no room"], ["exit", 3]]})
    assert run.end() == 78
    cause = run.json("cause.json")
    how = "the engine ended by itself while loading weights 2/64 (exit code 3)"
    assert cause["cause"] == f"{how}: torch.OutOfMemoryError: no room"
    assert "torch.OutOfMemoryError: no room" in cause["last_words"]


@pytest.mark.parametrize(
    "frame",
    [
        # FlashML-org/FreeToken#490, vllm-project/vllm#16150 and #21858, and a library that a power loss cut
        '  File "/opt/x/site-packages/triton/runtime/cache.py", line 124, in get_group',
        '(Worker pid=9) ERROR   File "/c/torch_compile_cache/ea/rank_5_0/inductor_cache/bx/c.py", line 3, in call',
        "The most likely reason is that a previous compilation failed, leading to a corrupted compilation artifact.",
        "OSError: /c/flashinfer/cached_ops/sampling.so: file too short",
    ],
)
def test_a_damaged_compile_cache_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/kimi-rig/drill/vllm-1")
    words = [["log", frame], ["log", "json.decoder.JSONDecodeError: Expecting value"], ["exit", 1]]
    run = Run(tmp_path, {"load": [*WEIGHTS, *words]})
    assert run.end() == 78
    assert "damaged: `rm -rf /var/cache/kimi-rig/drill/vllm-1`, and start again" in run.json("cause.json")["cause"]


def test_a_crash_in_service_is_restarted_and_a_crash_loop_ends(tmp_path: Path) -> None:
    quick = limits(restarts=2, restart_delay_seconds=0.3, **FAST)
    run = Run(tmp_path, limits=quick)
    run.until("READY=1")
    kill_engine(run)
    assert run.end() == 1
    failures = [run.json("cause.json")["cause"]]
    assert failures[0].startswith("the engine ended by itself (signal SIGKILL")
    for expected in (1, 78):
        series = {"failures": failures, "monotonic": time.monotonic()}
        (tmp_path / "run" / "failures.json").write_text(json.dumps(series))
        run = Run(tmp_path, {"load": [["exit", 4]]}, limits=quick)
        assert f"restart {len(failures)} of 2" in run.until("waiting")
        assert run.end() == expected
        failures.append(run.json("cause.json")["cause"])
    assert "given up after 3 failures in a row" in failures[-1]


def test_a_start_by_hand_does_not_take_up_a_series_that_a_stop_left_behind(tmp_path: Path) -> None:
    """A stop in the second before systemd's restart keeps the runtime directory."""
    left = {"failures": ["x", "y", "z"], "monotonic": time.monotonic() - 60}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "failures.json").write_text(json.dumps(left))
    run = Run(tmp_path, limits=limits(restarts=2, **FAST))
    run.until("READY=1")
    assert not (tmp_path / "run" / "failures.json").exists()


def kill_engine(run: Run) -> None:
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)


def test_a_frozen_engine_is_told_and_a_slow_one_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, limits=limits(frozen_minutes=0.03, **{**FAST, "watch_answer_seconds": 0.3}))
    run.until("serving; answered")
    # Longer than it takes to be told frozen, but the counters of others' requests move.
    run.faults.write_text(json.dumps({"slow": 3, "moving": True}))
    run.until("serving; slow")
    time.sleep(2)
    assert run.process.poll() is None
    run.faults.write_text(json.dumps({"slow": 60}))
    assert run.end() == 1
    assert "frozen" in run.json("cause.json")["cause"]


def test_wrong_answers_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, limits=limits(**FAST))
    run.until("serving; answered")
    run.faults.write_text(json.dumps({"status": 500}))
    assert run.end() == 1
    assert "3 times in a row it gave no good answer, the last: HTTP 500" in run.json("cause.json")["cause"]


def test_a_load_without_progress_fails_and_a_busy_one_does_not(tmp_path: Path) -> None:
    quick = limits(no_progress_minutes=0.02, **FAST)
    stuck = Run(tmp_path, {"load": [*WEIGHTS, ["stop"]]}, limits=quick)
    assert stuck.end() == 78
    assert "no progress for 0.02 min" in (cause := stuck.json("cause.json")["cause"])
    assert cause.endswith("it was loading weights 2/64")


def test_a_stop_in_the_middle_of_a_load(tmp_path: Path) -> None:
    run = Run(tmp_path, {"load": [*WEIGHTS, ["sleep", 60]]}, limits=limits(stop_seconds=1))
    run.until("loading weights 2/64")
    begun = time.monotonic()
    assert run.stop() == 0
    assert time.monotonic() - begun < 5


def test_a_stop_that_a_loading_engine_loses_is_said_again(tmp_path: Path) -> None:
    load = [*WEIGHTS, ["sleep", 3]]
    run = Run(tmp_path, {"load": load, "deaf": "while loading"}, limits=limits(stop_seconds=60))
    run.until("loading weights 2/64")
    begun = time.monotonic()
    assert run.stop() == 0
    assert time.monotonic() - begun < 15
    assert "LISTENING" in run.journal, "the signal came while it loaded"


def test_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        run = Run(tmp_path, port=stranger.getsockname()[1])
        assert run.end() == 78
    assert "pre-check port" in run.json("cause.json")["cause"]
    assert "rigctl free" in run.json("cause.json")["cause"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("accepted", [True, False])
def test_a_signal_of_a_stranger_is_no_stop(tmp_path: Path, number: signal.Signals, accepted: bool) -> None:
    load = [] if accepted else [*WEIGHTS, ["sleep", 60]]
    run = Run(tmp_path, {"load": load}, limits=limits(stop_seconds=1, **FAST))
    run.until("READY=1" if accepted else "loading weights 2/64")
    code = f"import os; os.kill({run.process.pid}, {number})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert run.end() == 1, "systemd starts it again"
    cause = run.json("cause.json")["cause"]
    assert f"sent {number.name} to the supervisor" in cause and "use `systemctl stop kimi-drill.service`" in cause


@pytest.mark.parametrize("seconds", [0.4, 1.5])
def test_a_stop_and_continue_of_the_supervisor_is_no_signal(seconds: float) -> None:
    """CPython's sigtimedwait returns a siginfo of chance then, such as a SIGHUP from nobody."""
    program = "import signal, time; from rigctl.supervisor.serve import SIGNALS, received_within as within\n"
    program += "signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS); print('up', flush=True)\n"
    program += f"print([within({seconds}) for _ in range(4)], flush=True); print(within(60).si_signo)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        for _ in range(4):
            time.sleep(seconds / 4)
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "[None, None, None, None]\n"
        process.terminate()
        assert process.stdout.readline() == f"{signal.SIGTERM.value}\n"


def test_a_supervisor_that_was_stopped_and_continued_serves_on(tmp_path: Path) -> None:
    run = Run(tmp_path, limits=limits(**FAST))
    run.until("READY=1")
    for _ in range(5):
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(0.7)
        run.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
    assert run.process.poll() is None, run.journal
    assert run.stop() == 0


def test_running_requests_are_drained(tmp_path: Path) -> None:
    run = Run(tmp_path, drain="none", limits=limits(**{**FAST, "watch_seconds": 60}))
    run.until("READY=1")
    run.faults.write_text(json.dumps({"slow": 1.5}))
    with socket.create_connection(("127.0.0.1", run.port)) as client:
        body = json.dumps({"messages": [], "max_tokens": 4})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        time.sleep(0.3)
        assert run.stop() == 0
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert "draining: 1 running" in run.until("draining: 1")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_key_is_in_force_and_nowhere_to_be_read(tmp_path: Path, engine: str) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "api-key").write_text("s3cret-key\n")
    speculation = None if engine == "sglang" else EAGLE3
    more = {"engine": engine, "api_key": True, "speculation": speculation}
    run = Run(tmp_path, {"tell_key": True}, **more)
    run.until("READY=1")
    [engine_pid] = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    assert b"s3cret" not in Path(f"/proc/{engine_pid}/cmdline").read_bytes()
    assert "api_key='***'" in run.journal
    assert "s3cret" not in run.journal
    assert "POST /invocations (generates)" in run.json("started.json")["proved"]["routes"]["open_without_key"]
    assert not (tmp_path / "run" / "engine.yaml").exists(), "SGLang's file of arguments goes once it is read"
    assert run.stop() == 0


def test_a_secret_variable_reaches_the_engine_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "env.DRILL_TOKEN").write_text("s3cret-token\n")
    run = Run(tmp_path)
    run.until("READY=1")
    [engine_pid] = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    assert b"DRILL_TOKEN=s3cret-token" in Path(f"/proc/{engine_pid}/environ").read_bytes().split(b"\0")
    assert 'KIMI {"DRILL_TOKEN": "***"}' in run.journal and "s3cret" not in run.journal
    assert run.stop() == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "credentials"]
    assert written and not [path for path in written if b"s3cret" in path.read_bytes()]


def test_lines_of_the_log_are_as_private_as_the_log(tmp_path: Path) -> None:
    run = Run(tmp_path, {"load": [["log", "prompt: my secret diary"], ["exit", 3]]})
    assert run.end() == 78
    holders = [path for path in tmp_path.rglob("*.json") if "secret diary" in path.read_text()]
    assert [path.name for path in holders if path.name != "specification.json"] == ["cause.json"]
    assert (tmp_path / "run" / "cause.json").stat().st_mode & 0o777 == 0o640


def test_a_key_that_is_not_in_force_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "api-key").write_text("key")
    run = Run(tmp_path, None, "--config", "/dev/null", api_key=True)
    assert run.end() == 78
    assert "GET /v1/models answers 200 without the API key" in run.json("cause.json")["cause"]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "is empty or cannot be read"), (b"two\nlines", "not one line"), (b"\xff\x00", "not one line")],
)
def test_a_key_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "api-key").write_bytes(content)
    run = Run(tmp_path, api_key=True)
    assert run.end() == 78
    assert why in run.json("cause.json")["cause"]


def test_a_specification_that_cannot_be_read_is_not_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path, limits={})
    assert run.end() == 78
    assert "specification.json: limits.no_progress_minutes: is missing" in run.until("STATUS")


def test_a_full_disk_ends_the_log_file_but_not_the_engine(tmp_path: Path) -> None:
    run = Run(tmp_path, {"load": [["shout", 2 << 20]]}, limits=limits(run_log_mib=1, **FAST))
    run.until("READY=1")
    assert "ends early (it has reached its size)" in run.journal
    assert run.stop() == 0


def test_log_files_of_old_runs_go(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for day in range(10, 25):
        (tmp_path / "logs" / f"2026-01-{day}T00-00-00-1.log").touch()
    run = Run(tmp_path, limits=limits(kept_runs=10))
    run.until("READY=1")
    assert run.stop() == 0
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(names) == 10
    assert names[0].startswith("2026-01-16")
