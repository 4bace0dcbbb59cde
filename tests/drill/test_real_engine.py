"""The first six faults, switches and the supervisor's cost on the deployed CPU engine; a quarter of an hour.

`pytest tests/drill/test_real_engine.py --real`
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterator

import pytest

from rigctl.contract.layout import CONFIGURATIONS, UNITS
from tests.drill.conftest import HOME, SUPERVISOR, DrillBox, listens, memory_group

NAME = "vllm-eagle3-custom"
API_SERVER = r"\S+/bin/python -m vllm\.entrypoints"
HOG = "import time; kept = [bytearray(b'x' * (1 << 20)) for _ in range(400)]; time.sleep(60)"
QUICK = {"frozen_minutes": 0.3, "watch_seconds": 3, "watch_answer_seconds": 5, "restart_delay_seconds": 1}


@pytest.fixture(scope="module")
def box(session_box: DrillBox, request: pytest.FixtureRequest) -> Iterator[DrillBox]:
    if not request.config.getoption("--real"):
        pytest.skip("--real starts the deployed engine several times")
    # Of the drill's own models, where no stand-in engine was installed before.
    session_box.path(HOME).mkdir(exist_ok=True)
    path = session_box.path(f"{CONFIGURATIONS}/{NAME}.json")
    before = path.read_text()
    content = json.loads(before)
    path.write_text(json.dumps({**content, "limits": {**content["limits"], **QUICK}}))
    yield session_box
    session_box.ssh(f"systemctl stop kimi-{NAME}")
    path.write_text(before)


@pytest.mark.parametrize(
    ("fault", "who", "number"),
    [
        ("API server killed (SIGKILL)", API_SERVER, "KILL"),
        ("worker killed (SIGKILL)", "VLLM::Worker", "KILL"),
        ("engine core frozen (SIGSTOP)", "VLLM::EngineCore", "STOP"),
        ("supervisor killed (SIGKILL)", SUPERVISOR, "KILL"),
    ],
)
def test_a_fault_in_service_is_restarted(box: DrillBox, fault: str, who: str, number: str) -> None:
    box.ssh(f"systemctl stop kimi-{NAME}; systemctl start kimi-{NAME}")
    old = box.ssh(f"systemctl show -P MainPID kimi-{NAME}")
    begun = time.monotonic()
    box.ssh(f"kill -{number} {box.pid(NAME, who, prefix='')}")
    row = box.until(NAME, 300, prefix="", state="active", restarts=1)
    assert box.ssh(f"systemctl show -P MainPID kimi-{NAME}") != old
    assert row["started"]["proved"]["speculation"]["accepted"] > 0
    box.told(f"real engine: {fault}", "active again", f"restarted after: {row['failures'][0]}", begun)


def test_out_of_memory(box: DrillBox) -> None:
    with memory_group(box) as limit:
        box.ssh(f"systemctl stop kimi-{NAME}; systemctl start kimi-{NAME}")
        begun = time.monotonic()
        limit(50)
        # A neighbour takes the rest; the kernel ends whoever holds most, which is the engine.
        box.ssh(f"systemd-run -q --collect --unit drill-hog python3 -c {shlex.quote(HOG)}")
        row = box.until(NAME, 120, prefix="", restarts=1)
        box.ssh("systemctl stop drill-hog", check=False)
    row = box.until(NAME, 300, prefix="", state="active")
    fault = "real engine: out of memory (the whole box in a memory cgroup of the computer)"
    box.told(fault, "active again", f"restarted after: {row['failures'][0]}", begun)


def test_the_port_is_taken(box: DrillBox) -> None:
    port = json.loads(box.path(f"{CONFIGURATIONS}/{NAME}.json").read_text())["endpoints"][0]["port"]
    stranger = f"systemd-run -q --collect --unit drill-stranger python3 -m http.server -b 127.0.0.1 {port}"
    box.ssh(f"systemctl stop kimi-{NAME}; {stranger}; {listens(port)}")
    begun = time.monotonic()
    try:
        with pytest.raises(AssertionError):
            box.ssh(f"systemctl start kimi-{NAME}")
    finally:
        subprocess.run(box.box.ssh_command("systemctl stop drill-stranger"), check=True)
    row = box.until(NAME, prefix="", state="failed")
    box.told("real engine: port taken by a stranger", "failed", row["status"], begun)


def test_a_stop_during_the_load_is_quick(box: DrillBox) -> None:
    box.ssh(f"systemctl stop kimi-{NAME}; systemctl start --no-block kimi-{NAME}")
    while box.state(NAME, "")["status"].split(" (")[0] in ("", "checking", "starting the engine"):
        time.sleep(0.2)
    begun = time.monotonic()
    box.ssh(f"systemctl stop kimi-{NAME}")
    row = box.state(NAME, "")
    assert (row["state"], row["last_end"]["result"]) == ("inactive", "success")
    assert time.monotonic() - begun < 60, "the engine loses a signal that comes while it loads"
    box.told("real engine: stopped while it loads", "inactive", "(nothing)", begun)


def test_a_degenerate_model_is_not_accepted_and_both_verdicts_are_shown(box: DrillBox) -> None:
    """The zero-norm model: one token over and over, which its drafter foresees perfectly."""
    name, target, drafter = "drill-degenerate", f"{HOME}/degenerate", f"{HOME}/degenerate-drafter"
    specification = json.loads(box.path(f"{CONFIGURATIONS}/{NAME}.json").read_text())
    for kind, place in (("target", target), ("drafter", drafter)):
        source = {"kind": "directory"}
        content = {"format": 1, "name": f"drill-{kind}", "role": kind, "destination": place, "source": source}
        box.ssh(f"rm -rf {place}; rigctl tiny-model {kind}-degenerate {place}")
        box.path(f"{HOME}/{kind}.json").write_text(json.dumps(content))
        box.ssh(f"rigctl checkpoints adopt drill-{kind} --spec {HOME}/{kind}.json")
    used = {**specification["checkpoints"], "target": "drill-target", "drafter": "drill-drafter"}
    texts = {f"{CONFIGURATIONS}/{name}.json": json.dumps({**specification, "checkpoints": used})}
    texts[f"{UNITS}/kimi-{name}.service"] = box.path(f"{UNITS}/kimi-{NAME}.service").read_text()
    for path, text in texts.items():
        moved = text.replace(specification["target_path"], target).replace(specification["drafter_path"], drafter)
        box.path(path).write_text(moved.replace(NAME, name))
    box.ssh(f"systemctl daemon-reload; systemctl stop kimi-{NAME}")
    begun = time.monotonic()
    try:
        box.ssh(f"systemctl start kimi-{name}", check=False)
        row = box.until(name, 300, prefix="", state="failed")
    finally:
        box.ssh("rigctl checkpoints forget drill-target; rigctl checkpoints forget drill-drafter", check=False)
    found = re.search(r"completion: \S+ is degenerate: .*speculation: (\d+)/(\d+) accepted", row["status"])
    assert found and found[1] == found[2], row["status"]
    box.told("real engine: degenerate output (zero-norm model)", "failed", row["status"], begun)


ASK = """
import json, re, time, urllib.request
at = "http://127.0.0.1:%d"
body = {"model": %r, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 200}
for _ in range(900):
    try:
        request = urllib.request.Request(at + "/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=60).read()
        break
    except OSError:
        time.sleep(0.5)
text = urllib.request.urlopen(at + "/metrics", timeout=60).read().decode()
for name in ("accepted", "draft"):
    print(sum(float(n) for n in re.findall(r"^vllm:spec_decode_num_%%s_tokens_total.* (\\S+)$" %% name, text, re.M)))
"""


def test_other_weights_beside_the_drafters_are_found_before_vllm_loads_them(box: DrillBox) -> None:
    """What vLLM does with them is shown by starting it without the supervisor: every draft is wrong then."""
    specification = json.loads(box.path(f"{CONFIGURATIONS}/{NAME}.json").read_text())
    place, name = specification["drafter_path"], specification["checkpoints"]["drafter"]
    unit = box.path(f"{UNITS}/kimi-{NAME}.service").read_text()
    [argv] = re.findall(r"^ExecStart=.*? -- (.+)$", unit, re.MULTILINE)
    environment = [f"--setenv={shlex.split(one)[0]}" for one in re.findall(r"^Environment=(.+)$", unit, re.MULTILINE)]
    [user] = re.findall(r"^User=(.+)$", unit, re.MULTILINE)
    ask = ASK % (specification["endpoints"][0]["port"], specification["model"])
    bare = shlex.join(
        [
            "systemd-run",
            "-q",
            "--collect",
            "--unit",
            "drill-mixed",
            f"--uid={user}",
            *environment,
            "--",
            *shlex.split(argv),
        ]
    )

    def counted() -> tuple[float, float]:
        box.ssh(f"systemctl stop kimi-{NAME}; {bare}")
        try:
            accepted, drafted = map(float, box.ssh(f"python3 -c {shlex.quote(ask)}").split())
        finally:
            box.ssh("systemctl stop drill-mixed", check=False)
        return accepted, drafted

    # The cache directory is the unit's: it is made by a start.
    box.ssh(f"systemctl stop kimi-{NAME}; systemctl start kimi-{NAME}; rigctl checkpoints verify {name}")
    right, drafted = counted()
    assert right == drafted > 0
    box.ssh(f"rm -rf {HOME}/never; rigctl tiny-model drafter-never {HOME}/never")
    begun = time.monotonic()
    try:
        box.ssh(f"install -m 444 {HOME}/never/model.safetensors {place}/z-old.safetensors")
        wrong, drafted = counted()
        assert wrong == 0 < drafted, "vLLM does not load what lies beside the proved weights: is the fault still one?"
        for full in ("", "--full"):
            said = box.ssh(f"rigctl checkpoints verify {name} {full} 2>&1; echo exit $?", check=False)
            assert "extra weights: z-old.safetensors" in said and "exit 1" in said
        assert "damaged" in box.ssh(f"rigctl checkpoints status {name}")
        box.ssh(f"systemctl start kimi-{NAME}", check=False)
        row = box.until(NAME, 60, prefix="", state="failed")
        assert "z-old.safetensors" in row["status"] and "move it out" in row["status"]
        box.told("real engine: other weights beside the drafter's", "failed", row["status"], begun)
    finally:
        box.ssh(f"rm -f {place}/z-old.safetensors")
    box.ssh(f"rigctl checkpoints verify {name} --full; systemctl reset-failed kimi-{NAME}; systemctl start kimi-{NAME}")


OTHER = "vllm-base"
AS_DEPLOYED = "vllm-eagle3-aq-medai"  # with the thresholds that the host's data gives
# Asks like a client that cannot wait, and prints when it was answered first.
CLIENT = """
import http.client, sys, time
while True:
    try:
        c = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
        for path in ("/v1/models", "/health"):
            c.request("GET", path)
            r = c.getresponse()
            r.read()
            if r.status != 200:
                raise OSError
        print(time.time())
        break
    except (OSError, http.client.HTTPException):
        time.sleep(0.01)
"""


def test_the_first_moment_is_noticed_and_a_switch_has_no_gaps(box: DrillBox) -> None:
    port = json.loads(box.path(f"{CONFIGURATIONS}/{NAME}.json").read_text())["endpoints"][0]["port"]
    box.ssh(f"systemctl start kimi-{OTHER}")
    begun = time.monotonic()
    noticed, probes, gaps, parts = [], [], [], []
    for to in (NAME, OTHER, NAME, OTHER, NAME):
        client = shlex.quote(CLIENT)
        script = (
            f"t=$(date +%s.%N); systemctl start --no-block kimi-{to}; "
            # The old engine still answers while it is asked to stop.
            f"until [ ! -e /run/kimi-rig/{NAME if to == OTHER else OTHER}/started.json ]; do sleep 0.05; done; "
            f"first=$(python3 -c {client} {port}); systemctl start kimi-{to}; "
            f"echo $t $(date +%s.%N) $first $(cat /run/kimi-rig/{to}/started.json)"
        )
        start, end, first, text = box.ssh(script).split(" ", 3)
        old = NAME if to == OTHER else OTHER
        told = box.ssh(f"journalctl --no-pager -o cat -u kimi-{old} -n 200 | grep -a 'of the stop' | tail -n 1")
        stop = float(re.search(r"within ([0-9.]+) s", told)[1])  # type: ignore[index]  # absent: fails
        started = json.loads(text)
        noticed.append(started["noticed_at"] - float(first))
        probes.append(started["probe_seconds"])
        gaps.append(float(end) - float(start) - stop - started["load_seconds"] - started["probe_seconds"])
        parts.append((stop, started["load_seconds"]))
    stops, loads = zip(*parts, strict=True)
    row = (
        f"noticed after {statistics.median(noticed):.2f} s, probes {statistics.median(probes):.2f} s, "
        f"gaps {statistics.median(gaps):.2f} s beside stop {statistics.median(stops):.2f} s and "
        f"load {statistics.median(loads):.2f} s (medians of 5)"
    )
    box.told("real engine: 5 switches", "active", row, begun)
    print(row, noticed, gaps)
    assert statistics.median(noticed) <= 0.5, row
    assert statistics.median(gaps) <= 2, row


def test_the_supervisor_costs_little(box: DrillBox) -> None:
    box.ssh(f"systemctl start kimi-{AS_DEPLOYED}")
    begun = time.monotonic()
    pid = box.pid(AS_DEPLOYED, SUPERVISOR, prefix="")
    look = f"cut -d' ' -f14,15 /proc/{pid}/stat; getconf CLK_TCK; grep VmRSS /proc/{pid}/status"
    time.sleep(5)
    before, after = (box.ssh(f"sleep {seconds}; {look}").split() for seconds in (0, 90))
    share = (sum(map(int, after[:2])) - sum(map(int, before[:2]))) / int(after[2]) / 90
    resident = int(after[4]) / 1024
    row = f"supervisor: {100 * share:.2f} % of a core, {resident:.1f} MiB resident"
    box.told("real engine: 90 s of service", "active", row, begun)
    box.ssh(f"systemctl stop kimi-{AS_DEPLOYED}")
    assert share < 0.01, row
    assert resident < 40, row
