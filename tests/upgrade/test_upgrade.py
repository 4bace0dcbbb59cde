"""A host of the previous version serves through its edge; this version deploys over it and back. In this order, on one
box, and a client asks all the time."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import requests

from rig.sandbox import Box
from rig.sandbox.limits import IN_BOX
from rigctl.contract import layout
from tests.upgrade.conftest import EDGE_PORT, INVENTORY, KEY, Previous, Tree, succeeded

CONFIGURATION = "vllm-eagle3-custom"
UNIT = layout.unit_name(CONFIGURATION)
FILES = f"cat {layout.UNITS}/kimi-* {layout.CONFIGURATIONS}/* {layout.EDGE}/*.cfg {layout.EDGE}/*.lua"
"""Shell: all that a rollback brings back."""
KEPT = "find /shared /data/eagle3 /opt/kimi-rig/env -printf '%p %i %s %T@\\n' | sort"
"""Shell: checkpoints, drafters and environments, file by file."""
EDGE = (
    f"systemctl show -p ActiveState -p MainPID -p InvocationID -p NRestarts {layout.EDGE_UNIT}; "
    f"sha256sum {layout.EDGE}/*.map {layout.EDGE}/*.pem {layout.CREDENTIALS}/*"
)
"""Shell: which run of the edge this is, whatever it has loaded anew; its keys and certificates."""
OTHER = layout.unit_name("vllm-eagle3-aq-medai")
DRAFTER = "/data/eagle3/aq-medai-k2-drafter"
START_SECONDS = 300


class Host:
    """The box as its operator sees it."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self.mark()

    def ssh(self, command: str) -> str:
        done = subprocess.run(self._box.ssh_command(command), capture_output=True, text=True, check=False)
        return succeeded(done).stdout

    def mark(self) -> None:
        """Count jobs from here on."""
        self._cursor = self.ssh("journalctl -q -n 0 --show-cursor").strip().removeprefix("-- cursor: ")

    def jobs(self) -> set[str]:
        """Jobs of ours that systemd has started since the mark."""
        lines = self.ssh(f"journalctl -q -o json --after-cursor='{self._cursor}' _PID=1").splitlines()
        units = {str(json.loads(line).get("UNIT", "")) for line in lines}
        return {unit for unit in units if unit.startswith("kimi-job-")}

    def serving(self) -> str:
        """Which run of the unit this is."""
        return self.ssh(f"systemctl show -p ActiveState -p MainPID -p InvocationID -p NRestarts {UNIT}")

    def row(self) -> dict[str, Any]:
        """What `rigctl status` says of the configuration."""
        [found] = [row for row in json.loads(self.ssh("rigctl status --json")) if row["name"] == CONFIGURATION]
        return dict(found)

    def answers(self) -> None:
        """The engine answers, and its drafter is right as ever."""
        answer = json.loads(self.ssh(f"rigctl chat --json --configuration {CONFIGURATION} 'What is a token?'"))
        assert answer["content"] and answer["drafted"] == answer["accepted"] > 0

    def until_active(self, *, restarts: int) -> None:
        """Wait until systemd or a fallback has started it again."""
        end = time.monotonic() + START_SECONDS
        while (row := self.row())["state"] != "active" or row["restarts"] != restarts:
            assert time.monotonic() < end, row
            time.sleep(2)

    def tried(self, command: str) -> str:
        """What a command prints that may fail."""
        return self.ssh(f"{command}; true")

    def healthy(self) -> None:
        """It serves what was deployed."""
        row = self.row()
        assert (row["state"], row["stale"], row["edited"]) == ("active", False, []), row
        assert "STALE" not in self.ssh("rigctl status")
        self.answers()


class Client:
    """A client of the edge: it knows the authority and a key, and asks again and again while the block runs."""

    def __init__(self, authority: Path) -> None:
        self._authority = authority
        self._found: Counter[str] = Counter()
        self._ended, self._asks = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            with self._asks:
                self._found[self.ask()] += 1

    def ask(self) -> str:
        """Status of one question; without an answer why there is none."""
        question = {
            "model": "/shared/kimi-k2.5-int4",
            "messages": [{"role": "user", "content": "What is a token?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        try:
            answer = requests.post(
                f"https://localhost:{EDGE_PORT}/v1/chat/completions",
                headers={"Authorization": f"Bearer {KEY}"},
                json=question,
                verify=str(self._authority),
                timeout=60,
            )
            assert answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] == 8, answer.text
        except (requests.RequestException, AssertionError, LookupError, ValueError) as error:
            return repr(error)
        return str(answer.status_code)

    def until_served(self) -> None:
        """Wait for the engine, and forget what was asked before: the edge had none to ask."""
        end = time.monotonic() + START_SECONDS
        with self._asks:
            while (status := self.ask()) != "200":
                assert status in ("502", "503") and time.monotonic() < end, status
                time.sleep(0.5)
            self._found.clear()

    def served(self) -> None:
        """Since it was last looked, every question was answered."""
        with self._asks:
            found, self._found = self._found, Counter()
        assert found.keys() == {"200"}, found


@dataclass(frozen=True)
class Before:
    """The host as the previous version left it."""

    serving: str
    kept: str
    files: str
    edge: str


@pytest.fixture(scope="module")
def host(box: Box) -> Host:
    return Host(box)


@pytest.fixture(scope="module")
def before(host: Host, previous_tree: Previous) -> Before:
    """The previous version has deployed, serves and proves its host."""
    succeeded(previous_tree.make("deploy"))
    host.ssh(f"systemctl start {UNIT}")
    host.answers()
    succeeded(previous_tree.make("verify"))
    host.mark()
    return Before(host.serving(), host.ssh(KEPT), host.ssh(FILES), host.ssh(EDGE))


@pytest.fixture(scope="module")
def client(host: Host, before: Before, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    authority = tmp_path_factory.mktemp("edge") / "authority.pem"
    authority.write_text(host.ssh(f"cat {layout.EDGE}/authority.pem"))
    with Client(authority) as found:
        yield found


def undisturbed(host: Host, before: Before, client: Client) -> None:
    """Engine and edge of the previous version run on with the keys they had, and every client was answered; nothing was
    staged, proved or built again."""
    assert (host.serving(), host.ssh(EDGE)) == (before.serving, before.edge)
    client.served()
    host.healthy()
    # A probe only looks at an environment: asked once more where this version asks for more.
    jobs = {unit for unit in host.jobs() if not unit.startswith(("kimi-job-hostkit-", "kimi-job-builder-probe-"))}
    assert not jobs, f"run again: {', '.join(sorted(jobs))}"
    changed = set(host.ssh(KEPT).splitlines()) ^ set(before.kept.splitlines())
    assert not changed, "\n".join(sorted(changed)[:20])


def test_the_plan_shows_the_upgrade_and_changes_nothing(
    host: Host, before: Before, client: Client, kept_data_tree: Tree
) -> None:
    program = host.ssh(f"readlink {layout.HOSTKIT}/current")
    plan = kept_data_tree.plan()
    assert plan.returncode == 2 and "Install rigctl" in plan.stdout, plan.stdout + plan.stderr
    assert (host.ssh(FILES), host.ssh(f"readlink {layout.HOSTKIT}/current")) == (before.files, program)
    undisturbed(host, before, client)


def test_a_deploy_with_the_previous_host_data_disturbs_nothing(
    host: Host, before: Before, client: Client, kept_data_tree: Tree
) -> None:
    deploy = succeeded(kept_data_tree.deploy())
    assert "STALE" not in deploy.stdout and "still runs as it was before" not in deploy.stdout + deploy.stderr
    undisturbed(host, before, client)


def test_a_deploy_with_its_own_disturbs_nothing(host: Host, before: Before, client: Client, this_tree: Tree) -> None:
    succeeded(this_tree.deploy())
    undisturbed(host, before, client)


def test_a_second_deploy_changes_nothing(host: Host, before: Before, client: Client, this_tree: Tree) -> None:
    assert not this_tree.changes()
    assert succeeded(this_tree.plan()).stdout.splitlines()[0] == "sandbox: nothing to do"
    undisturbed(host, before, client)


def test_status_and_verification_read_what_still_runs(
    host: Host, before: Before, client: Client, this_tree: Tree
) -> None:
    row = host.row()
    assert row["accepted_at"] and row["started"]["proved"] and row["watch"], row
    status = succeeded(this_tree.run("rig", "status", INVENTORY)).stdout
    assert CONFIGURATION in status and "stale" not in status and "would change" not in status, status
    [found] = json.loads(succeeded(this_tree.run("rig", "status", INVENTORY, "--json")).stdout)
    assert ([one["configuration"] for one in found["services"]], found["drift"]) == ([CONFIGURATION], []), found
    succeeded(this_tree.verify())
    undisturbed(host, before, client)


def test_a_crash_is_taken_over(host: Host, before: Before, client: Client) -> None:
    """The supervisor of the previous version ends and says why; this version's clears up after it and starts again."""
    host.ssh(f"pkill -KILL -P $(systemctl show -P MainPID {UNIT})")
    host.until_active(restarts=1)
    client.until_served()
    host.healthy()
    [cause] = host.row()["failures"]
    assert re.search("the engine ended by itself .*SIGKILL", cause), cause


def test_a_rollback_returns_and_the_old_unit_starts(
    host: Host, before: Before, client: Client, this_tree: Tree
) -> None:
    if host.ssh(FILES) == before.files:
        # This version changes no unit: one more deploy gives the rollback something to return from.
        succeeded(this_tree.deploy("--pyinfra=--data", '--pyinfra=supervision={"kept_runs": 9}'))
        assert host.ssh(FILES) != before.files
    succeeded(this_tree.run("rig", "rollback", INVENTORY))
    assert (host.ssh(FILES), host.ssh(EDGE)) == (before.files, before.edge)
    client.served()
    host.ssh(f"systemctl restart {UNIT}")
    client.until_served()
    host.healthy()
    assert "rolled back to state" in this_tree.run("rig", "status", INVENTORY).stdout


def test_it_comes_back_also_by_a_fallback(host: Host, before: Before, client: Client, this_tree: Tree) -> None:
    """What the old unit wrote down while it served is enough to return to it from one that is not accepted."""
    succeeded(this_tree.deploy("--pyinfra=--data", "--pyinfra=roll_forward=yes"))
    away, back = f"mv {DRAFTER}/config.json {DRAFTER}.json", f"mv {DRAFTER}.json {DRAFTER}/config.json"
    host.ssh(f"{away}; ! systemctl start {OTHER}; {back}")
    host.until_active(restarts=0)
    client.until_served()
    host.healthy()
    assert f"{CONFIGURATION} is started again" in host.ssh("rigctl status")
    host.ssh(f"systemctl reset-failed {OTHER}")
    succeeded(this_tree.verify())


def test_what_a_newer_version_left_is_refused_before_anything_changes(host: Host, this_tree: Tree) -> None:
    running, files = host.serving(), host.ssh(f"{FILES}; {KEPT}")
    states = f"{layout.STATES}/????????????.json"
    back = ("rig", "rollback", INVENTORY, "--to", host.ssh(f"basename $(ls -t {states} | tail -n 1) .json").strip())
    for path, arguments, words in (
        (layout.RECEIPT, ("rig", "plan", INVENTORY), "newer than this version of kimi-rig reads"),
        (layout.RECEIPT, ("rig", "deploy", INVENTORY), "newer than this version of kimi-rig reads"),
        (states, back, "of another version of kimi-rig"),
    ):
        host.ssh(f'for f in {path}; do cp -p $f $f.kept; sed -i \'s/"format": [0-9]*/"format": 99/\' $f; done')
        refused = this_tree.run(*arguments)
        host.ssh(f"for f in {path}; do mv $f.kept $f; done")
        assert refused.returncode == 1 and words in refused.stdout + refused.stderr, refused.stdout + refused.stderr
        assert (host.serving(), host.ssh(f"{FILES}; {KEPT}")) == (running, files)
    assert not this_tree.changes()


def test_an_uninstall_takes_the_edge_along(host: Host, before: Before, this_tree: Tree) -> None:
    there = (
        f"ls -d {layout.UNITS}/*edge* {layout.UNITS}/haproxy* {layout.UNITS}/*/*edge* /etc/sysusers.d/kimi* "
        f"/etc/haproxy /usr/sbin/haproxy; find {layout.ETC} -type f ! -path {IN_BOX}; "
        f"getent passwd {layout.EDGE_USER}; "
        f"systemctl list-units --all --plain --no-legend 'kimi-*' 'haproxy*'; ss -Hltn 'sport = :{EDGE_PORT}'"
    )
    assert str(EDGE_PORT) in host.tried(there)
    gone = this_tree.run("rig", "uninstall", INVENTORY, "--yes")
    succeeded(gone)
    assert host.tried(there) == "", gone.stdout
