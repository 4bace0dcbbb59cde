"""The first six faults on the deployed CPU engine: `pytest tests/drill/test_real_engine.py --real`; ten minutes."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Iterator

import pytest

from rig.layout import CONFIGURATIONS
from tests.drill.conftest import SUPERVISOR, DrillBox, memory_group

NAME = "vllm-eagle3-custom"
API_SERVER = r"\S+/bin/python -m vllm\.entrypoints"
HOG = "import time; kept = [bytearray(b'x' * (1 << 20)) for _ in range(400)]; time.sleep(60)"
QUICK = {"frozen_minutes": 0.3, "watch_seconds": 3, "watch_answer_seconds": 5, "restart_delay_seconds": 1}


@pytest.fixture(scope="module")
def box(session_box: DrillBox, request: pytest.FixtureRequest) -> Iterator[DrillBox]:
    if not request.config.getoption("--real"):
        pytest.skip("--real starts the deployed engine several times")
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
        ("out of memory (the whole box in a memory cgroup of the computer)", API_SERVER, "memory"),
    ],
)
def test_a_fault_in_service_is_restarted(box: DrillBox, fault: str, who: str, number: str) -> None:
    box.ssh(f"systemctl stop kimi-{NAME}; systemctl start kimi-{NAME}")
    old = box.ssh(f"systemctl show -P MainPID kimi-{NAME}")
    pid = box.pid(NAME, who, prefix="")
    begun = time.monotonic()
    if number == "memory":
        with memory_group(box, spare_mib=50):
            # A neighbour takes the rest; the kernel ends whoever holds most, which is the engine.
            box.ssh(f"systemd-run -q --unit drill-hog python3 -c {shlex.quote(HOG)}")
            row = box.until(NAME, 60, prefix="", restarts=1)
            box.ssh("systemctl stop drill-hog", check=False)
        row = box.until(NAME, 300, prefix="", state="active")
    else:
        box.ssh(f"kill -{number} {pid}")
        row = box.until(NAME, 300, prefix="", state="active", restarts=1)
    assert box.ssh(f"systemctl show -P MainPID kimi-{NAME}") != old
    assert row["started"]["proved"]["speculation"]["accepted"] > 0
    box.told(f"real engine: {fault}", "active again", f"restarted after: {row['failures'][0]}", begun)


def test_the_port_is_taken(box: DrillBox) -> None:
    port = json.loads(box.path(f"{CONFIGURATIONS}/{NAME}.json").read_text())["port"]
    box.ssh(
        f"systemctl stop kimi-{NAME}; systemd-run -q --unit drill-stranger python3 -m http.server -b 127.0.0.1 {port}"
    )
    begun = time.monotonic()
    try:
        time.sleep(1)
        with pytest.raises(AssertionError):
            box.ssh(f"systemctl start kimi-{NAME}")
    finally:
        subprocess.run(box.box.ssh_command("systemctl stop drill-stranger"), check=True)
    row = box.until(NAME, prefix="", state="failed")
    box.told("real engine: port taken by a stranger", "failed", row["status"], begun)
