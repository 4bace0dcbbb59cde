"""The fault drill: each fault ends in a state and a message that `rigctl status` shows. About four minutes."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
import time

import pytest

from rig.artifacts.units import run_specification
from rig.plan.command_lines import command_line
from rig.plan.host_plan import HostPlan
from rigctl.contract.layout import CREDENTIALS, UNITS
from tests.drill.conftest import ENGINE, HOME, PORT, SUPERVISOR, WORKER, DrillBox, listens, memory_group, slower


@pytest.mark.parametrize(
    ("fault", "who", "number"),
    [
        ("engine killed (SIGKILL of the API server)", ENGINE, "KILL"),
        ("engine's worker killed (SIGKILL)", WORKER, "KILL"),
        ("engine frozen (SIGSTOP)", ENGINE, "STOP"),
        ("supervisor killed (SIGKILL)", SUPERVISOR, "KILL"),
        ("supervisor frozen (SIGSTOP)", SUPERVISOR, "STOP"),
    ],
)
def test_a_fault_in_service_is_restarted(box: DrillBox, fault: str, who: str, number: str) -> None:
    box.install(a={"plan": {"worker": True, "orphan": True}})
    if "supervisor frozen" in fault:
        unit = box.path(f"{UNITS}/kimi-drill-a.service")
        unit.write_text(unit.read_text().replace("WatchdogSec=2min", "WatchdogSec=12"))
        box.ssh("systemctl daemon-reload")
    box.start("a")
    old = box.pid("a", ENGINE)
    begun = time.monotonic()
    box.ssh(f"kill -{number} {box.pid('a', who)}")
    row = box.until("a", 60, state="active", restarts=1)
    assert box.pid("a", ENGINE) != old
    assert box.ssh(f"ps -o pid= -p {old}", check=False) == "", "nothing of the old run is left"
    cause = row["failures"][0]
    box.told(fault, "active again", f"restarted after: {cause}", begun)
    assert row["started"]["proved"]["completion"]


@pytest.mark.parametrize("number", ["TERM", "INT", "HUP"])
def test_only_systemd_stops_a_unit(box: DrillBox, number: str) -> None:
    box.install(a={})
    box.start("a")
    begun = time.monotonic()
    box.ssh(f"kill -{number} {box.pid('a', SUPERVISOR)}")
    row = box.until("a", 60, state="active", restarts=1)
    cause = row["failures"][0]
    assert f"sent SIG{number} to the supervisor" in cause and "use `systemctl stop kimi-drill-a.service`" in cause
    box.told(f"SIG{number} to the supervisor by hand", "active again", f"restarted after: {cause}", begun)
    box.ssh(f"systemctl kill -s {number} kimi-drill-a")
    assert box.until("a", state="inactive")["last_end"]["result"] == "success"
    time.sleep(3)
    assert box.state("a")["state"] == "inactive", "systemctl kill stays down"


def test_a_second_listener_in_service_is_noticed(box: DrillBox) -> None:
    """Of the same user, on the same port, behind the unit's back: it takes a part of the requests."""
    box.install(a={})
    box.start("a")
    code = (
        "import socket, time; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); "
        f"s.bind(('127.0.0.1', {PORT})); s.listen(); time.sleep(600)"
    )
    user = box.ssh("systemctl show -P User kimi-drill-a").strip()
    begun = time.monotonic()
    box.ssh(f"systemd-run -q --collect -p User={user} --unit drill-stranger python3 -c {shlex.quote(code)}")
    try:
        row = box.until("a", 60, restarts=1)
        assert "is also answered by process" in row["failures"][0], row
        row = box.until("a", 60, state="failed")
        assert "cannot be listened on" in row["status"], row
    finally:
        box.ssh("systemctl stop drill-stranger", check=False)
    box.told("a second listener on the port, of the same user", "failed", row["status"], begun)


def test_all_that_a_failed_start_displaced_comes_back(box: DrillBox) -> None:
    """Two that run side by side, and one that takes both places and is not accepted."""
    box.install(a={}, b={"port": PORT + 1}, c={"port": PORT + 2})
    for name, others in (("a", "c"), ("b", "c"), ("c", "a b")):
        unit = box.path(f"{UNITS}/kimi-drill-{name}.service")
        # Ordered, as units that exclude each other are: it starts once both have stopped.
        lines = "".join(f"Conflicts=kimi-drill-{other}.service\n" for other in others.split())
        lines += "After=kimi-drill-a.service kimi-drill-b.service\n" if name == "c" else ""
        unit.write_text(unit.read_text().replace("[Unit]\n", f"[Unit]\n{lines}", 1))
    box.ssh("systemctl daemon-reload")
    box.set_faults("c", answer="degenerate")
    for name in ("a", "b"):
        box.start(name)
    begun = time.monotonic()
    said = box.ssh("rigctl switch drill-c 2>&1", check=False)
    assert "are started again" in said and "drill-a" in said and "drill-b" in said, said
    for name in ("a", "b"):
        box.until(name, 60, state="active")
    assert sorted(box.state("c")["fallback"]["to"]) == ["drill-a", "drill-b"]
    box.told("a start that displaced two is not accepted", "both are active again", said.splitlines()[-1], begun)


@pytest.mark.parametrize("whole", [False, True], ids=["engine", "box"])
def test_out_of_memory(box: DrillBox, *, whole: bool) -> None:
    box.install(a={})
    box.start("a")
    with memory_group(box, None if whole else box.pid("a", ENGINE)) as limit:
        if whole:
            box.ssh("systemctl restart kimi-drill-a")
        begun = time.monotonic()
        limit(30)
        box.set_faults("a", grow=60)
        row = box.until("a", 60, restarts=1)
        box.set_faults("a")
    row = box.until("a", 60, state="active")
    assert "lack of memory" in row["failures"][0]
    who = "the whole box" if whole else "the engine"
    box.told(f"out of memory ({who} in a memory cgroup of the computer)", "active again", row["failures"][0], begun)


def test_an_engine_that_does_not_stop_is_killed_and_the_stop_is_clean(box: DrillBox) -> None:
    box.install(slower(drain_seconds=10, stop_seconds=10), a={"plan": {"deaf": True}})
    unit = box.path(f"{UNITS}/kimi-drill-a.service")
    unit.write_text(unit.read_text().replace("WatchdogSec=2min", "WatchdogSec=12"))
    box.ssh("systemctl daemon-reload")
    box.start("a")
    pid = box.pid("a", ENGINE)
    begun = time.monotonic()
    box.ssh("systemctl stop kimi-drill-a")
    row = box.state("a")
    assert (row["state"], row["last_end"]["result"]) == ("inactive", "success"), row
    assert box.ssh(f"ps -o pid= -p {pid}", check=False) == ""
    assert "is killed: it did not end within 20." in box.ssh("journalctl --no-pager -n 20 -u kimi-drill-a")
    box.told("engine ignores the stop, longer than the watchdog waits", "inactive, nothing left", "(nothing)", begun)


def test_a_crash_loop_ends_in_failed_with_its_cause(box: DrillBox) -> None:
    box.install(a={})
    box.start("a")
    begun = time.monotonic()
    box.set_faults("a", status=500)
    row = box.until("a", 60, state="failed")
    assert "given up after" in row["status"]
    assert row["status"] in box.ssh("systemctl status kimi-drill-a", check=False)
    box.told("crash loop (every answer an error)", "failed", row["status"], begun)
    # A start by hand begins a new count.
    box.set_faults("a")
    box.start("a")
    assert box.state("a")["state"] == "active"


OTHER_SIZE = (
    f"""sed -i 's/"hidden_size": 8/"hidden_size": 9/' {HOME}/drafter/config.json; """
    f"rigctl checkpoints adopt drafter --spec {HOME}/drafter.json"
)
STRANGER = f"systemd-run -q --collect --unit drill-stranger python3 -m http.server -b 127.0.0.1 {PORT}; {listens(PORT)}"


@pytest.mark.parametrize(
    ("fault", "spoil", "why"),
    [
        ("drafter missing", f"mv {HOME}/drafter {HOME}/drafter-away", "the drafter is missing"),
        ("drafter of the wrong size", OTHER_SIZE, "hidden size 9 of the drafter's input, 8 of the target"),
        ("drafter changed since it was proved", f"touch {HOME}/drafter/config.json", "not as it was proved"),
        ("code in the checkpoint that was never proved", f"echo > {HOME}/target/new.py", "is not in the manifest of"),
        (
            "target damaged",
            f"truncate -s -1 {HOME}/target/model.safetensors",
            "is damaged: model.safetensors: truncated",
        ),
        (
            "port taken by a stranger",
            STRANGER,
            "cannot be listened on",
        ),
        ("key file missing", f"rm {CREDENTIALS}/api-key", "credential is missing or unreadable"),
        ("key file empty", f"echo > {CREDENTIALS}/api-key", "the API key is empty"),
        ("key file is a directory", f"cd {CREDENTIALS}; rm api-key; mkdir api-key; touch api-key/x", "cannot be read"),
        ("key file unreadable (no text)", f"head -c 64 /dev/urandom > {CREDENTIALS}/api-key", "not one line"),
    ],
)
def test_what_cannot_serve_fails_at_once(box: DrillBox, fault: str, spoil: str, why: str) -> None:
    box.prepare()
    box.install(a={"key": "key" in fault, "trust_remote_code": "code" in fault})
    box.ssh(f"echo drill-key > {CREDENTIALS}/api-key; {spoil}")
    begun = time.monotonic()
    try:
        assert box.start("a", check=False)
        row = box.until("a", state="failed", restarts=0)
    finally:
        box.ssh("systemctl stop drill-stranger 2>/dev/null", check=False)
    assert why in row["status"]
    box.told(fault, "failed", row["status"], begun)


@pytest.mark.parametrize(
    ("fault", "plan", "faults", "why"),
    [
        ("degenerate output", {}, {"answer": "degenerate"}, "one character repeated"),
        ("load without progress", {"load": [["log", "Loading weights took"], ["stop"]]}, {}, "no progress"),
        ("engine dies while loading", {"load": [["log", "CUDA error: out of memory"], ["exit", 1]]}, {}, "exit code 1"),
    ],
)
def test_a_start_that_fails_goes_back(
    box: DrillBox, fault: str, plan: dict[str, object], faults: dict[str, str], why: str
) -> None:
    box.install(a={}, b={"plan": plan})
    box.start("a")
    box.set_faults("b", **faults)
    begun = time.monotonic()
    said = box.ssh("rigctl switch drill-b 2>&1", check=False)
    assert why in said and "drill-a is started again" in said
    row = box.state("b")
    assert (row["state"], row["fallback"]["to"]) == ("failed", ["drill-a"])
    assert why in row["status"]
    box.until("a", state="active")
    box.told(fault, "failed; the one before is active again", row["status"], begun)
    # Kept visible until the operator switches again.
    assert "fallback: " in box.ssh("rigctl status")


def test_shared_memory_full_and_left_over(box: DrillBox) -> None:
    box.install(slower(shared_memory="4m", minimum_shm_mib=8), a={})
    begun = time.monotonic()
    box.start("a", check=False)
    row = box.until("a", state="failed")
    assert "/dev/shm has" in row["status"]
    box.told("/dev/shm full", "failed", row["status"], begun)
    box.install(slower(shared_memory="16m", minimum_shm_mib=8), a={"plan": {"segment_mib": 10}})
    for _ in range(3):
        box.start("a")
        box.ssh("systemctl kill -s KILL kimi-drill-a; sleep 0.2; systemctl stop kimi-drill-a")
    assert "sgl_shm" not in box.ssh("ls /dev/shm")


def test_disk_full_of_logs(box: DrillBox) -> None:
    box.install(a={"plan": {"load": [["shout", 3 << 20]]}})
    box.ssh("mkdir -p /var/log/kimi-rig/drill-a; mount -t tmpfs -o size=1m tmpfs /var/log/kimi-rig/drill-a")
    begun = time.monotonic()
    try:
        box.start("a")
        assert "ends early (No space left on device)" in box.ssh("journalctl -u kimi-drill-a -n 300 | cut -c1-300")
        row = box.until("a", state="active")
        box.told("disk full of logs", "active", row["status"], begun)
    finally:
        box.ssh("systemctl stop kimi-drill-a; umount /var/log/kimi-rig/drill-a")


def test_two_switches_at_once(box: DrillBox) -> None:
    box.install(a={}, b={"plan": {"load": [["sleep", 1]]}}, c={"plan": {"load": [["sleep", 1]]}})
    box.start("a")
    begun = time.monotonic()
    box.ssh("systemctl start kimi-drill-b & systemctl start kimi-drill-c; wait", check=False)
    end = time.monotonic() + 30
    while True:
        states = {name: box.state(name)["state"] for name in "abc"}
        if sorted(states.values()) == ["active", "inactive", "inactive"] or time.monotonic() > end:
            break
        time.sleep(0.3)
    assert sorted(states.values()) == ["active", "inactive", "inactive"], states
    assert states["a"] == "inactive"
    box.told("two switches at once", "one of the two is active", "serving", begun)


def test_units_that_claim_nothing_in_common_run_together(box: DrillBox) -> None:
    box.install(a={}, b={"port": PORT + 1}, c={"port": PORT + 1})
    box.start("a")
    box.start("b")
    box.start("c")
    assert [box.state(name)["state"] for name in "abc"] == ["active", "inactive", "active"]


def test_a_replaced_checkpoint_makes_the_service_stale(box: DrillBox) -> None:
    box.prepare()
    box.install(a={})
    box.start("a")
    assert not box.state("a")["stale"]
    begun = time.monotonic()
    box.ssh(f"echo >> {HOME}/drafter/config.json; rigctl checkpoints adopt drafter --spec {HOME}/drafter.json")
    row = box.state("a")
    assert row["stale"]
    box.told("drafter replaced in service", "as it was", row["remarks"][0], begun)


def test_a_deploy_restarts_what_is_stale_only_as_it_is_told(box: DrillBox) -> None:
    box.install(a={})
    box.start("a")

    def deployed(restart: str, plan: HostPlan) -> tuple[str, str]:
        """The main process before and after the deploy's last step."""
        digests = {"drill-a": run_specification(plan, "drill-a").known_as}
        before = box.ssh("systemctl show -P MainPID kimi-drill-a")
        box.operation(f"running_current(name='Restart', digests={digests!r}, restart={restart!r})")
        return before, box.ssh("systemctl show -P MainPID kimi-drill-a")

    begun = time.monotonic()
    plan = box.change(a={"flags": {"changed": 1}})
    before, after = deployed("never", plan)
    assert before == after
    assert box.state("a")["stale"]
    # A request is running: the restart waits for it.
    box.set_faults("a", slow=4, moving=True)
    ask = f"curl -s -m 20 -d '{{\"messages\": []}}' http://127.0.0.1:{PORT}/v1/chat/completions"
    box.ssh(f"systemd-run -q --unit drill-client --collect {ask}")
    time.sleep(1)
    before, after = deployed("when-idle", plan)
    assert before == after
    box.set_faults("a")
    row = box.until("a", 30, state="active", stale=False)
    assert box.ssh("systemctl show -P MainPID kimi-drill-a") != before
    # An earlier deploy that failed before this step left its change behind: it is not lost.
    plan = box.change(a={"flags": {"changed": 2}})
    before, _ = deployed("now", plan)
    row = box.until("a", 30, state="active", stale=False)
    assert box.ssh("systemctl show -P MainPID kimi-drill-a") != before
    invocation = box.ssh("systemctl show -P InvocationID kimi-drill-a")
    deployed("now", plan)
    box.until("a", 30, state="active", stale=False)
    assert box.ssh("systemctl show -P InvocationID kimi-drill-a") == invocation, (
        "nothing is stale: nothing is restarted"
    )
    box.told("deploy changes a running service", "as `restart` says: never, when idle, now", row["status"], begun)


def test_a_unit_edited_by_hand_is_told(box: DrillBox) -> None:
    box.install(a={})
    begun = time.monotonic()
    box.ssh("systemctl edit --full kimi-drill-a --stdin 2>/dev/null <<'E' || true\nE\n", check=False)
    box.ssh(f"sed -i s/LimitNOFILE=.*/LimitNOFILE=1024/ {UNITS}/kimi-drill-a.service")
    [remark] = [text for text in box.state("a")["remarks"] if "EDITED" in text]
    box.told("unit edited by hand", "as it was", remark, begun)


def test_the_api_without_a_key_with_a_wrong_one_and_from_another_address(box: DrillBox) -> None:
    box.install(a={"key": True})
    box.ssh(f"echo drill-key > {CREDENTIALS}/api-key; chmod 600 {CREDENTIALS}/api-key")
    begun = time.monotonic()
    box.start("a")
    ask = (
        "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), source_address="
        "(sys.argv[2], 0)); c.request('GET', '/v1/models', headers={'Authorization': 'Bearer ' + sys.argv[3]}); "
        "print(c.getresponse().status)"
    )
    for address in ("127.0.0.1", "127.0.0.2"):
        for key, status in (("", "401"), ("wrong", "401"), ("drill-key", "200")):
            assert box.ssh(f"python3 -c {shlex.quote(ask)} {PORT} {address} '{key}'").strip() == status
    arguments = box.ssh(f"cat /proc/{box.pid('a', ENGINE)}/cmdline | tr '\\0' ' '")
    assert "drill-key" not in arguments
    assert "drill-key" not in box.ssh("journalctl -u kimi-drill-a; cat /var/log/kimi-rig/drill-a/*")
    [remark] = [text for text in box.state("a")["remarks"] if "open without" in text]
    box.told("API without key, with a wrong key, from 127.0.0.2", "active; 401 each time", remark, begun)


NASTY = [
    "two words",
    '{"a": "it\'s", "b": [1, 2]}',
    "100% $HOME ${HOME} $$",
    "back\\slash\\n",
    "größe 模型 🚀",
    "",
    ";",
    "tab\there",
    "new\nline",
    "%i %%",
    '"quoted"',
    "trailing\\",
    "a=b #c",
    "{x,y}*?~",
]


def test_quoting_is_exact(box: DrillBox) -> None:
    plan = box.install(
        a={
            "flags": {"nasty": NASTY, "json": {"deep": {"%n": "$x", "q": '"\\'}}},
            "environment": {f"DRILL_{n}": text for n, text in enumerate(NASTY)},
        }
    )
    assert box.ssh(f"systemd-analyze verify {UNITS}/kimi-drill-a.service 2>&1") == ""
    box.start("a")
    log = box.ssh("cat /var/log/kimi-rig/drill-a/*.log")
    found = json.loads(re.search(r"^ARGV (.*)$", log, re.MULTILINE)[1])  # type: ignore[index]
    entry = plan.serving["drill-a"]
    release = plan.environments["stand-in"].release
    expected = command_line(entry, release, plan.locations(entry), plan.data.supervision.drain_seconds)
    assert found == expected[1:]
    assert json.loads(re.search(r"^KIMI (.*)$", log, re.MULTILINE)[1]) == entry.environment  # type: ignore[index]


def test_the_sandbox_holds_and_is_measured(box: DrillBox) -> None:
    box.install(a={})
    box.start("a")
    text = box.ssh("systemd-analyze security kimi-drill-a kimi-fallback@drill-a --no-pager | grep -i overall")
    exposure = [float(number) for number in re.findall(r"service: ([0-9.]+)", text)]
    assert exposure and max(exposure[:1]) <= 1.5, text


def test_nothing_is_left_behind_after_20_switches(box: DrillBox) -> None:
    box.install(a={"plan": {"worker": True}}, b={"plan": {"segment_mib": 1}})
    box.start("a")

    def traces() -> dict[str, int]:
        script = (
            "ps -u kimi -o args= | grep -c kimi-rig-dril[l]; ls /dev/shm | wc -l; "
            f"grep -c ':{PORT:04X} 00000000:0000 0A' /proc/net/tcp; "
            "ls /proc/$(systemctl show -P MainPID kimi-drill-a)/fd | wc -l; "
            f"du -sk {HOME} /run/kimi-rig /var/cache/kimi-rig /var/lib/kimi-rig | awk '{{s+=$1}} END {{print s}}'"
        )
        names = ("processes", "segments", "listening", "file descriptors", "KiB")
        return dict(zip(names, map(int, box.ssh(script).split()), strict=True))

    before = traces()
    script = (
        "for i in 1 2 3 4 5 6 7 8 9 10; do for n in b a; do t=$(date +%s.%N); systemctl start kimi-drill-$n || exit 1; "
        "echo $t $(date +%s.%N) $(cat /run/kimi-rig/drill-$n/started.json); done; done"
    )
    gaps, noticed = [], []
    begun = time.monotonic()
    for line in box.ssh(script).splitlines():
        start, end, text = line.split(" ", 2)
        started = json.loads(text)
        gaps.append(float(end) - float(start) - started["load_seconds"] - started["probe_seconds"])
    for log in sorted(box.path("/var/log/kimi-rig/drill-a").glob("*.log"))[-1:]:
        listening = float(re.search(r"LISTENING ([0-9.]+)", log.read_text())[1])  # type: ignore[index]
        noticed.append(box.state("a")["started"]["noticed_at"] - listening)
    time.sleep(2)
    after = traces()
    assert {k: v for k, v in after.items() if k != "KiB"} == {k: v for k, v in before.items() if k != "KiB"}
    assert after["KiB"] - before["KiB"] < 64
    assert max(noticed) < 0.5
    assert statistics.median(gaps) <= 2, gaps
    box.told(
        "20 switches",
        "active, nothing left behind",
        f"gaps (with the engine's stop) {statistics.median(gaps):.2f} s in the median, {max(gaps):.2f} s at most; "
        f"noticed after {max(noticed):.2f} s",
        begun,
    )


HAND = f"python3 {HOME}/standin.py --port {PORT}"


def test_orphans_of_a_start_by_hand(box: DrillBox) -> None:
    box.install(a={})
    box.ssh(f"systemd-run -q --collect --unit drill-hand {HAND} --model sglang.launch_server; {listens(PORT)}")
    begun = time.monotonic()
    box.start("a", check=False)
    row = box.until("a", state="failed")
    named = box.ssh("rigctl free", check=False)
    assert f"port {PORT}" in named and "root" in named and "sglang.launch_server" in named
    assert box.ssh("systemctl is-active drill-hand").strip() == "active", "named, not ended"
    box.ssh("rigctl free --yes")
    box.start("a")
    box.told("orphan of a start by hand", "failed until `rigctl free --yes`", row["status"], begun)


def test_a_long_load_and_the_service_outlive_reloads_of_systemd(box: DrillBox) -> None:
    """systemd forgets that a start was given more time, and whoever installs a package reloads it (systemd#43000)."""
    box.prepare()
    patient = slower(no_progress_minutes=10)
    box.install(patient, a={"plan": {"load": [["log", "Starting to load model"], ["sleep", 200]]}})
    begun = time.monotonic()
    box.ssh("systemctl start --no-block kimi-drill-a; sleep 190; systemctl daemon-reload; systemctl daemon-reexec")
    row = box.until("a", 60, state="active")
    assert not row["failures"]
    box.told("systemd reloaded late in a load of 200 s", "active", row["status"], begun)
    pid = box.ssh("systemctl show -P MainPID kimi-drill-a")
    box.ssh("systemctl daemon-reexec; sleep 5; systemctl daemon-reload")
    assert box.state("a")["state"] == "active" and box.ssh("systemctl show -P MainPID kimi-drill-a") == pid


def test_a_reboot_in_the_middle_of_a_load(box: DrillBox) -> None:
    patient = slower(no_progress_minutes=1)
    box.install(patient, a={"plan": {"load": [["log", "Starting to load model"], ["sleep", 6]]}})
    box.ssh("systemctl enable -q kimi-drill-a; systemctl start --no-block kimi-drill-a; sleep 2")
    assert box.state("a")["state"] == "activating"
    begun = time.monotonic()
    for verb in ("stop", "up"):
        done = subprocess.run(
            [sys.executable, "-m", "rig", "sandbox", verb], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    row = box.until("a", 60, state="active")
    box.told("reboot in the middle of a load", "active after the boot", row["status"], begun)
