"""A host of the previous version serves; this version deploys over it and back. In this order, on one box."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import pytest

from rig.sandbox import Box
from rigctl.contract import layout
from tests.upgrade.conftest import INVENTORY, Previous, Tree, succeeded

CONFIGURATION = "vllm-eagle3-custom"
UNIT = layout.unit_name(CONFIGURATION)
FILES = f"cat {layout.UNITS}/kimi-* {layout.CONFIGURATIONS}/*"
"""Shell: all that a rollback brings back."""
KEPT = "find /shared /data/eagle3 /opt/kimi-rig/env -printf '%p %i %s %T@\\n' | sort"
"""Shell: checkpoints, drafters and environments, file by file."""
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

    def healthy(self) -> None:
        """It serves what was deployed."""
        row = self.row()
        assert (row["state"], row["stale"], row["edited"]) == ("active", False, []), row
        assert "STALE" not in self.ssh("rigctl status")
        self.answers()


@dataclass(frozen=True)
class Before:
    """The host as the previous version left it."""

    serving: str
    kept: str
    files: str


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
    return Before(host.serving(), host.ssh(KEPT), host.ssh(FILES))


def undisturbed(host: Host, before: Before) -> None:
    """The engine of the previous version runs on; nothing was staged, proved or built again."""
    assert host.serving() == before.serving
    host.healthy()
    # A probe only looks at an environment: asked once more where this version asks for more.
    jobs = {unit for unit in host.jobs() if not unit.startswith(("kimi-job-hostkit-", "kimi-job-builder-probe-"))}
    assert not jobs, f"run again: {', '.join(sorted(jobs))}"
    changed = set(host.ssh(KEPT).splitlines()) ^ set(before.kept.splitlines())
    assert not changed, "\n".join(sorted(changed)[:20])


def test_the_plan_shows_the_upgrade_and_changes_nothing(host: Host, before: Before, kept_data_tree: Tree) -> None:
    program = host.ssh(f"readlink {layout.HOSTKIT}/current")
    plan = kept_data_tree.plan()
    assert plan.returncode == 2 and "Install rigctl" in plan.stdout, plan.stdout + plan.stderr
    assert (host.ssh(FILES), host.ssh(f"readlink {layout.HOSTKIT}/current")) == (before.files, program)
    undisturbed(host, before)


def test_a_deploy_with_the_previous_host_data_disturbs_nothing(
    host: Host, before: Before, kept_data_tree: Tree
) -> None:
    deploy = succeeded(kept_data_tree.deploy())
    assert "STALE" not in deploy.stdout and "still runs as it was before" not in deploy.stdout + deploy.stderr
    undisturbed(host, before)


def test_a_deploy_with_its_own_disturbs_nothing(host: Host, before: Before, this_tree: Tree) -> None:
    succeeded(this_tree.deploy())
    undisturbed(host, before)


def test_a_second_deploy_changes_nothing(host: Host, before: Before, this_tree: Tree) -> None:
    assert not this_tree.changes()
    assert succeeded(this_tree.plan()).stdout.splitlines()[0] == "sandbox: nothing to do"
    undisturbed(host, before)


def test_status_and_verification_read_what_still_runs(host: Host, before: Before, this_tree: Tree) -> None:
    row = host.row()
    assert row["accepted_at"] and row["started"]["proved"] and row["watch"], row
    status = succeeded(this_tree.run("rig", "status", INVENTORY)).stdout
    assert CONFIGURATION in status and "stale" not in status and "would change" not in status, status
    [found] = json.loads(succeeded(this_tree.run("rig", "status", INVENTORY, "--json")).stdout)
    assert ([one["configuration"] for one in found["services"]], found["drift"]) == ([CONFIGURATION], []), found
    succeeded(this_tree.verify())
    undisturbed(host, before)


def test_a_crash_is_taken_over(host: Host, before: Before) -> None:
    """The supervisor of the previous version ends and says why; this version's clears up after it and starts again."""
    host.ssh(f"pkill -KILL -P $(systemctl show -P MainPID {UNIT})")
    host.until_active(restarts=1)
    host.healthy()
    [cause] = host.row()["failures"]
    assert re.search("the engine ended by itself .*SIGKILL", cause), cause


def test_a_rollback_returns_and_the_old_unit_starts(host: Host, before: Before, this_tree: Tree) -> None:
    if host.ssh(FILES) == before.files:
        # This version changes no unit: one more deploy gives the rollback something to return from.
        succeeded(this_tree.deploy("--pyinfra=--data", '--pyinfra=supervision={"kept_runs": 9}'))
        assert host.ssh(FILES) != before.files
    succeeded(this_tree.run("rig", "rollback", INVENTORY))
    assert host.ssh(FILES) == before.files
    host.ssh(f"systemctl restart {UNIT}")
    host.healthy()
    assert "rolled back to state" in this_tree.run("rig", "status", INVENTORY).stdout


def test_it_comes_back_also_by_a_fallback(host: Host, before: Before, this_tree: Tree) -> None:
    """What the old unit wrote down while it served is enough to return to it from one that is not accepted."""
    succeeded(this_tree.deploy("--pyinfra=--data", "--pyinfra=roll_forward=yes"))
    away, back = f"mv {DRAFTER}/config.json {DRAFTER}.json", f"mv {DRAFTER}.json {DRAFTER}/config.json"
    host.ssh(f"{away}; ! systemctl start {OTHER}; {back}")
    host.until_active(restarts=0)
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
