"""What operators are told: servers that are not ours, the status of hosts, how to talk to one, the tour."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.__main__ import main as kimi_rig
from rig.artifacts.receipt import receipt_items
from rig.catalog.entries import ROOT
from rig.cli import status, tour
from rig.cli.connect import talk_lines
from rig.cli.converge import inventory_hosts
from rig.facts.servers import Server, Servers
from rig.host.settings import HostSettings
from rig.operations.hostkit import hostkit_path
from rig.plan.host_plan import HostPlan, host_plan
from rig.plan.neighbours import interruptions
from tests.support.plans import GROUP_DATA

pytestmark = pytest.mark.slow

DATA: dict[str, Any] = {
    "ml_env": "/opt/kimi-rig/env",
    "models": "/shared",
    "drafters": "/data/eagle3",
    "base_packages": ["rsync"],
    "service_user": "kimi",
    "configurations": ["sglang-base"],
}
BY_HAND = "listens|0.0.0.0:8000|4711|root||python3 -m sglang.launch_server --port 8000"
MODELS = 'models|0.0.0.0:8000|{"data": [{"id": "a|b"}]}'


def plan(**more: Any) -> HostPlan:
    return host_plan({**DATA, **more}, "ubuntu-24.04", HostSettings())


def test_servers_are_read() -> None:
    own = "listens|127.0.0.1:8000|12|kimi|kimi-sglang-base.service|rigctl serve"
    found = Servers().process([BY_HAND, MODELS, own, "models|127.0.0.1:8000|", "gpu||99|bob|session.service|train"])
    assert found == [
        Server("0.0.0.0:8000", 4711, "root", "", "python3 -m sglang.launch_server --port 8000", ("a|b",)),
        Server("127.0.0.1:8000", 12, "kimi", "kimi-sglang-base.service", "rigctl serve"),
        Server("", 99, "bob", "session.service", "train"),
    ]
    assert [server.ours for server in found] == [False, True, False]


def test_this_machines_listeners_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = subprocess.run(["sh", "-c", Servers().command([port])], capture_output=True, text=True, check=True)
    [found] = Servers().process(result.stdout.splitlines())
    assert (found.address, found.models) == (f"127.0.0.1:{port}", ())


def test_a_server_by_hand_is_named_with_what_changes_for_its_clients() -> None:
    servers = Servers().process([BY_HAND, MODELS])
    interrupted, clients = interruptions(plan(), servers)
    assert (
        "process 4711 (python3 -m sglang.launch_server --port 8000; user root) listens on 0.0.0.0:8000" in interrupted
    )
    assert "kimi-sglang-base.service cannot start until you end it" in interrupted
    assert "address 127.0.0.1:8000 (this host only); no API key is asked for" in clients
    assert "model /shared/kimi-k2.5-int4 (now: a|b)" in clients
    with_boot = interruptions(plan(enable_at_boot="sglang-base", api_key_file="/k"), servers)
    assert "an API key is needed" in with_boot[1]
    assert with_boot[2] == "kimi-sglang-base.service is to start at boot: after the next boot it is what serves"


def test_ours_and_other_ports_are_not_told() -> None:
    ours = Server("127.0.0.1:8000", 1, "kimi", "kimi-sglang-base.service", "")
    other = Server("127.0.0.1:9000", 2, "root", "", "")
    assert interruptions(plan(), [ours, other]) == []
    assert "holds a GPU" in interruptions(plan(), [Server("", 3, "bob", "", "train")])[0]


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        (
            "kimi-1",
            {"ssh_user": "ubuntu", "_sudo": True, "ssh_port": 2200, "ssh_key": "/my keys/k", "api_key_file": "~/key"},
            [
                "ssh -p 2200 -i '/my keys/k' ubuntu@kimi-1 'sudo systemctl start kimi-sglang-base.service'",
                "ssh -f -N -o ExitOnForwardFailure=yes -L 8000:127.0.0.1:8000 -p 2200 -i '/my keys/k' ubuntu@kimi-1 &&",
                "-H @<(sed 's/^/Authorization: Bearer /' ~/key)",
            ],
        ),
        (
            "@local",
            {},
            ["systemctl start kimi-sglang-base.service", "curl -sS http://127.0.0.1:8000/v1/chat/completions"],
        ),
        ("kimi-2", {"configurations": []}, []),
    ],
)
def test_how_to_talk_to_a_host(name: str, data: dict[str, Any], lines: list[str]) -> None:
    found = talk_lines(name, {**DATA, **data})
    assert len(found) == len(lines)
    assert all(part in line for part, line in zip(lines, found, strict=True)), found


def answer(receipt: Any, *, rows: Any = (), pending: str = "", missing: str = "", digest: str = "d") -> str:
    told = rows or [{"name": "sglang-base", "state": "inactive", "digest": digest}]
    return (
        f"\n== system\nubuntu-24.04\n\n== receipt\n{json.dumps(receipt)}\n\n== rigctl\n{json.dumps(told)}\n"
        f"\n== pending\n{pending}\n\n== missing\n{missing}\n"
    )


@pytest.fixture
def receipt() -> dict[str, Any]:
    items = receipt_items(plan(), hostkit_path(plan()))
    dated = {key: {**item, "since": "2026-11-29"} for key, item in items.items()}
    dated["unit/kimi-sglang-base.service"]["digest"] = "d"
    return {"version": "abc", "at": "2026-11-29T10:00:00", "items": dated}


def test_status_says_what_cards_and_links_reported(receipt: dict[str, Any]) -> None:
    text = answer(receipt, rows=[]) + "\n== health\nXid 79 (PCI:0000:61:00)\ncard 2: 8 of 16 lanes\n"
    assert "health: Xid 79 (PCI:0000:61:00); card 2: 8 of 16 lanes" in status.read_status("kimi-1", DATA, text).line()
    assert "health" not in status.read_status("kimi-1", DATA, answer(receipt, rows=[])).line()


def test_status_of_a_host_that_serves(receipt: dict[str, Any]) -> None:
    row = {
        "name": "sglang-base",
        "state": "active",
        "release": "sglang-0.5.9",
        "digest": "d",
        "accepted_at": 1_764_410_400,
        "acceptance_length": 2.256,
        "stale": False,
    }
    found = status.read_status("kimi-1", DATA, answer(receipt, rows=[{"name": "a", "state": "inactive"}, row]))
    assert found.line() == (
        "kimi-1: sglang-base active (sglang-0.5.9), accepted since 2025-11-29 10:00 UTC, acceptance length 2.26, "
        "drift: none, reboot pending: no"
    )
    other = {"name": "other", "state": "activating", "release": "sglang-0.5.23", "running_release": "sglang-0.5.16"}
    row |= {"model": "kimi", "address": "127.0.0.1:8000"}
    found = status.read_status("kimi-1", DATA, answer(receipt, rows=[row, other]))
    assert "acceptance length 2.26, other activating (sglang-0.5.16; deployed: sglang-0.5.23), drift" in found.line()
    assert "kimi-1: sglang-base with kimi at 127.0.0.1:8000 active (sglang-0.5.9), accepted" in found.line()


def test_status_names_drift_and_a_pending_reboot(receipt: dict[str, Any]) -> None:
    receipt["items"]["hostkit"]["path"] = "/opt/kimi-rig/hostkit/old"
    text = answer(receipt, pending="kernel arguments", missing="/usr/local/bin/rigctl", digest="other")
    found = status.read_status("kimi-1", DATA, text)
    assert found.drift == [
        "a deploy would change hostkit, unit/kimi-sglang-base.service",
        "/usr/local/bin/rigctl is missing",
    ]
    assert found.line().endswith("reboot pending: kernel arguments")


def test_status_of_a_bare_host() -> None:
    assert (
        status.read_status("kimi-1", DATA, "\n== system\ndebian-12\n\n== receipt\n").line()
        == "kimi-1: nothing is deployed"
    )


def test_a_host_that_cannot_be_reached_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "group_data").symlink_to(GROUP_DATA)
    inventory = tmp_path / "gone.py"
    inventory.write_text('gpu = [("gone", {"ssh_hostname": "127.0.0.1", "ssh_port": 9})]\n')
    assert kimi_rig(["status", str(inventory), "--json"]) == 1
    [row] = json.loads(capsys.readouterr().out)
    assert (row["host"], row["reached"]) == ("gone", False)
    assert "refused" in row["trouble"]


def test_a_host_that_is_no_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimi_rig(["status", tour.INVENTORY]) == 1
    assert capsys.readouterr().out == (
        "@fake/turin: cannot be reached: no machine stands behind this name (pyinfra's connectors)\n"
    )


def test_verification_says_in_a_line_a_host_why_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "group_data").symlink_to(GROUP_DATA)
    hosts = tmp_path / "gone.py"
    hosts.write_text('gpu = [("gone", {"ssh_hostname": "127.0.0.1", "ssh_port": 9}), ("@fake/one", {})]\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/host", "--inventory", str(hosts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"^gone: cannot be reached: .*Connection refused$", result.stdout, re.MULTILINE), result.stdout
    assert "\n@fake/one: no machine stands behind this name" in result.stdout
    assert "2 failed in" in result.stdout and "Traceback" not in result.stdout + result.stderr


def test_the_tour_shows_plan_unit_reasons_and_how_to_talk(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimi_rig(["tour"]) == 0
    short = capsys.readouterr().out
    assert short.count("make tour PAGE=") == len(tour.PAGES) - 1 and len(short.splitlines()) < 120
    for words in ("Base | Install packages", "--speculative-algorithm EAGLE3", "iommu = off", "2,370", "curl -sS"):
        assert words in short
    assert kimi_rig(["tour", *tour.PAGES]) == 0
    text = capsys.readouterr().out
    assert re.search(r"@fake/turin: \d+ operations would change it", text)
    assert "refused" not in text
    assert "/shared/kimi-k2.5-int4: is staged from moonshotai/Kimi-K2.5" in text
    assert "ExecStart=/opt/kimi-rig/hostkit/current/bin/rigctl serve" in text
    assert "kernel_argument.iommu = off" in text
    assert re.search(r"2,?370", text) and "sglang-eagle3-aq-medai" in text
    assert "ssh -f -N -o ExitOnForwardFailure=yes -L 8000:127.0.0.1:8000 turin.example.com &&" in text
    assert [host["name"] for host in inventory_hosts(tour.INVENTORY)] == ["@fake/turin"]


FOREIGN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["state", "name", "digest", "accepted_at", "items", "version", "id", "before", "release"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=60)
@given(FOREIGN, FOREIGN, FOREIGN, st.text(max_size=10))
def test_a_host_may_say_anything_of_itself(receipt_: Any, rows: Any, state: Any, more: str) -> None:
    sections = {"system": "ubuntu-24.04", "receipt": json.dumps(receipt_), "rigctl": json.dumps(rows)}
    sections |= {"state": json.dumps(state), "missing": more, "pending": more}
    said = "".join(f"\n== {name}\n{text}\n" for name, text in sections.items())
    assert status.read_status("kimi-1", DATA, said).line().startswith("kimi-1: ")


@pytest.mark.parametrize("answer", ["yes", "cat /dev/zero", "printf '\\n== receipt\\n'; yes '['"])
def test_a_host_that_answers_without_end_is_cut_off(
    tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = status.ask("kimi-1", {**DATA, "ssh_hostname": "127.0.0.1"}, tmp_path / "config")
    assert not found.reached and found.trouble == "its answer has no end"
