"""What operations of the edge do on hosts in each state, with facts in place of a host."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rig.artifacts.edge import CONFIGURATION, RENEWAL_TIMER, edge_files
from rig.facts.servers import Server, Servers
from rig.facts.state import InstalledPackages, Lines, PathStates, UnitProperties
from rig.operations import apt, common, edge, system
from rig.operations.common import PLAN_LOG
from rig.operations.files import File, PathState
from rigctl.contract import layout
from tests.support.plans import gpu_plan

HOST = {"address": "0.0.0.0", "port": 8443, "tls": {"authority": ["kimi-1"]}, "keys": {"alice": "~/a"}}
UNIT, ENGINE = layout.EDGE_UNIT, "kimi-vllm-base.service"
RUNS = {"ActiveState": "active", "UnitFileState": "enabled"}


class Host:
    """Answers facts, and keeps what an operation says and would run."""

    name, print_prefix, current_op_hash = "kimi-1", "", None
    state = SimpleNamespace(is_executing=False)

    def __init__(self, log: Path) -> None:
        self.facts: dict[type, Any] = {
            InstalledPackages: [],
            Lines: [],
            PathStates: {},
            Servers: [],
            UnitProperties: {},
        }
        self._log = log

    def get_fact(self, fact: type, **_: Any) -> Any:
        return self.facts[fact]

    def noop(self, why: str) -> None:
        """Nothing is to be done."""

    def run(self, operation: Callable[..., Any], **arguments: Any) -> str:
        """The script of an operation; "" where it does nothing."""
        commands = operation._inner(**arguments)  # type: ignore[attr-defined]  # pyinfra keeps the function there
        return "\n".join(str(command.bits[0]) for command in commands)

    @property
    def said(self) -> str:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return "\n".join(str(json.loads(line).get("detail") or json.loads(line).get("notice")) for line in lines)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path / "log")
    monkeypatch.setenv(PLAN_LOG, str(tmp_path / "log"))
    for module in (apt, common, edge, system):
        monkeypatch.setattr(module, "host", found)
    return found


def files() -> list[File]:
    texts = edge_files(gpu_plan(edge=HOST, configurations=["vllm-base"]))
    return [File(path, text.encode()) for path, text in texts.items() if path.startswith(f"{layout.EDGE}/")]


def written() -> Mapping[str, PathState]:
    return {file.path: PathState("file", "0644", "root", "root", file.digest) for file in files()}


def test_it_is_started_where_its_address_is_free(host: Host) -> None:
    done = host.run(edge.running, files=files())
    assert f"systemctl enable -q {UNIT}" in done and f"systemctl start {UNIT}" in done


def test_it_waits_for_an_engine_of_before(host: Host) -> None:
    host.facts[Servers] = [Server("*:8443", 7, "kimi", ENGINE, "python")]
    done = host.run(edge.running, files=files(), takeovers=["it takes 0.0.0.0:8443 over"])
    assert f"systemctl enable -q {UNIT}" in done and f"systemctl start {UNIT}" not in done
    assert "takes 0.0.0.0:8443 over" in host.said and f"`systemctl restart {ENGINE}` lets it start" in host.said


@pytest.mark.parametrize("address", ["0.0.0.0:8443", "10.0.0.5:8443", "*:8443"])
def test_a_stranger_at_its_address_is_named(host: Host, address: str) -> None:
    host.facts[Servers] = [Server(address, 7, "www-data", "nginx.service", "nginx -g")]
    assert "exit 1" in host.run(edge.running, files=files())
    assert f"refused: {UNIT} cannot listen on {address}: process 7 of www-data ('nginx -g') does" in host.said


def test_one_that_runs_reloads_what_has_changed_and_nothing_else(host: Host) -> None:
    host.facts |= {UnitProperties: {UNIT: RUNS}, PathStates: written()}
    assert not host.run(edge.running, files=files(), takeovers=["told until it runs"])
    host.facts[Lines] = [f"{layout.EDGE}/keys.map"]
    assert f"systemctl reload {UNIT}" in host.run(edge.running, files=files(), takeovers=["told until it runs"])
    host.facts |= {Lines: [], PathStates: {**written(), CONFIGURATION: PathState("file", "0644", "root", "root", "")}}
    assert f"systemctl reload {UNIT}" in host.run(edge.running, files=files())
    assert "keys.map" in host.said and "haproxy.cfg" in host.said and "told until" not in host.said


def test_the_stock_service_stays_off_where_the_package_is_new(host: Host) -> None:
    done = host.run(system.packages, names=["haproxy", "openssl"], masked="haproxy")
    assert "ln -s /dev/null /etc/systemd/system/haproxy.service" in done and "haproxy openssl" in done
    host.facts[InstalledPackages] = ["haproxy"]
    done = host.run(system.packages, names=["haproxy", "openssl"], masked="haproxy")
    assert "/dev/null" not in done.replace(">/dev/null", "").replace("2>/dev/null", ""), "the operator's own"
    host.facts[InstalledPackages] = ["haproxy", "openssl"]
    assert not host.run(system.packages, names=["haproxy", "openssl"], masked="haproxy")


def test_a_certificate_is_issued_and_its_timer_runs(host: Host) -> None:
    arguments: dict[str, Any] = {"command": ["true"], "path": f"{layout.EDGE}/tls.pem"}
    host.facts[Lines] = ["there is no certificate"]
    done = host.run(edge.certified, **arguments)
    assert "systemctl start kimi-edge-certificate.service" in done and f"--now {RENEWAL_TIMER}" in done
    host.facts |= {Lines: [], UnitProperties: {RENEWAL_TIMER: RUNS}}
    assert not host.run(edge.certified, **arguments)


def test_without_it_in_the_data_the_edge_goes(host: Host) -> None:
    host.facts[Lines] = [f"{UNIT} active", f"{RENEWAL_TIMER} active"]
    done = host.run(system.retired_units, keep=[ENGINE])
    assert f"systemctl stop {RENEWAL_TIMER} {UNIT}" in done and f"rm -f {layout.UNITS}/{RENEWAL_TIMER}" in done
    host.facts[Lines] = [f"{UNIT} active", "kimi-old.service active"]
    assert "exit 1" in host.run(system.retired_units, keep=[ENGINE])
    assert "refused: kimi-old.service still runs" in host.said
