"""Faults and rollbacks of engine environments on a box whose engine serves: it goes on serving through all of them.

In this order, on one box; another lock is the same lock with one more comment, which is another digest.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rigctl.contract import layout
from tests.drill.interruptions import Point, interrupt
from tests.sandbox.conftest import DeployBox
from tests.support.box import LIMIT, OVERLAY, RELEASE, overlay_with
from tests.support.box import LOCK as LOCK_FILE

LOCK = ROOT / LOCK_FILE
BASE = f"/opt/kimi-rig/env/{RELEASE}"
FEWER = 4
UNIT = f"{layout.UNITS}/kimi-vllm-base.service"
FORWARD = ("--pyinfra=--data", '--pyinfra=roll_forward="yes"')
ROLLBACK = ("rig", "rollback", "inventory/sandbox.py")


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def another_lock(number: int) -> str:
    return f"{LOCK.read_text()}# lock {number} of the drill\n"


def fewer_requests() -> str:
    return overlay_with(limit=FEWER)


class Serving:
    """The engine that serves, and what it was started with."""

    def __init__(self, box: DeployBox) -> None:
        self.box = box
        box.ssh("systemctl start kimi-vllm-base")
        self.pid = self.main_pid()
        self.environment = self.in_unit()
        self.before = self.environments()

    def main_pid(self) -> str:
        return self.box.ssh("systemctl show -P MainPID kimi-vllm-base").stdout.strip()

    def in_unit(self) -> str:
        """The environment that the unit file names."""
        found = re.search(rf"{BASE}/[0-9a-f]{{12}}", self.box.ssh(f"cat {UNIT}").stdout)
        assert found is not None
        return found[0]

    def environments(self) -> list[str]:
        return self.box.ssh(f"ls -d {BASE}/{'[0-9a-f]' * 12}").stdout.split()

    def goes_on(self) -> None:
        """The same process answers, from the environment it was started in."""
        assert self.main_pid() == self.pid
        assert self.environment in self.box.ssh(f"tr '\\0' ' ' < /proc/{self.pid}/cmdline").stdout
        assert json.loads(self.box.ssh("rigctl chat --json Hello").stdout)["content"]

    def failed(self, result: subprocess.CompletedProcess[str], *words: str) -> None:
        """It failed with these words; unit and environments are as they were, and the engine goes on."""
        output = result.stdout + result.stderr
        assert result.returncode == 1, output
        assert "Traceback" not in output, output
        for word in words:
            assert word in output, f"{word!r} is not in:\n{output[-6000:]}"
        assert self.in_unit() == self.environment
        assert self.environments() == self.before, "something half-made is left"
        self.goes_on()


@pytest.fixture(scope="module")
def serving(bare_box: DeployBox) -> Iterator[Serving]:
    deploy = bare_box.deploy()
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    yield Serving(bare_box)
    bare_box.ssh("systemctl stop kimi-vllm-base", check=False)


def test_a_wrong_hash(serving: Serving) -> None:
    wrong = re.sub(
        r"(?m)^(uvicorn==.*\\)\n(    --hash=sha256:.*\n)+",
        r"\1\n    --hash=sha256:" + "0" * 64 + "\n",
        LOCK.read_text(),
    )
    assert wrong != LOCK.read_text()
    with changed(LOCK, wrong):
        serving.failed(serving.box.deploy(), "uvicorn", "was not made and nothing uses it", "a wrong hash in the lock")


def test_a_wheel_is_missing_from_the_directory(serving: Serving) -> None:
    serving.box.ssh("mkdir -p /root/no-wheels")
    with changed(LOCK, another_lock(1)):
        deploy = serving.box.deploy("--pyinfra=--data", "--pyinfra=wheels=/root/no-wheels")
        serving.failed(deploy, "was not made and nothing uses it", "deploy again")


def test_the_disk_is_full_in_the_middle(serving: Serving) -> None:
    """Enough room at the preflight, none soon after the install has begun."""
    elsewhere = ("--pyinfra=--data", "--pyinfra=ml_env=/mnt/small")
    serving.box.ssh("mkdir -p /mnt/small && mount -t tmpfs -o size=100m tmpfs /mnt/small")
    try:
        serving.failed(serving.box.deploy(*elsewhere), "/mnt/small has 0 GB free")
        serving.box.ssh("mount -o remount,size=8g /mnt/small")
        fill = "until ls -d /mnt/small/.cache/archive-v*; do sleep 0.1; done; mount -o remount,size=150m /mnt/small"
        with subprocess.Popen(serving.box.box.ssh_command(fill), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            deploy = serving.box.deploy(*elsewhere)
        serving.failed(deploy, "No space left on device", "was not made and nothing uses it")
    finally:
        serving.box.ssh("umount -l /mnt/small; rmdir /mnt/small")


def test_a_release_that_is_known_to_be_bad(serving: Serving) -> None:
    bad = {"what": "it answers in riddles", "thread": "vllm#1", "refuse": True}
    with changed(OVERLAY, overlay_with(releases={RELEASE: {"known_bad": [bad]}})):
        words = (f"release {RELEASE} is known to be bad", "vllm#1", "accept_known_bad")
        serving.failed(serving.box.deploy(), *words)
        taken = serving.box.plan("--pyinfra=--data", f'--pyinfra=accept_known_bad=["{RELEASE}"]')
        assert "refused" not in taken.stdout and taken.returncode in (0, 2), taken.stdout


def test_a_hand_edited_file_ends_the_deploy_and_is_named(serving: Serving) -> None:
    box = serving.box
    file = box.ssh(f"ls {serving.environment}/lib/python3*/site-packages/vllm/sampling_params.py").stdout.strip()
    # A file of its own, as editors make it: the cache and other environments share the old one.
    box.ssh(f"mv {file} /root/kept.py; cp /root/kept.py {file}; echo '# mine' >> {file}")
    try:
        serving.failed(box.deploy(), "vllm/sampling_params.py: changed since it was proved", serving.environment)
        verify = box.verify()
        assert verify.returncode == 1 and "vllm/sampling_params.py: changed since it was proved" in verify.stdout
    finally:
        box.ssh(f"mv -f /root/kept.py {file}")
    assert box.deploy().returncode == 0


def test_a_job_killed_in_the_middle_of_the_install(serving: Serving) -> None:
    with changed(LOCK, another_lock(2)):
        assert interrupt(serving.box, Point("job killed on the host", "Build the environment", 3.0)) != 0
        assert serving.in_unit() == serving.environment
        serving.goes_on()


def test_an_upgrade_is_built_beside_and_a_rollback_returns_environment_unit_and_flags(serving: Serving) -> None:
    box = serving.box
    with changed(LOCK, another_lock(2)), changed(OVERLAY, fewer_requests()):
        upgrade = box.deploy()
        assert upgrade.returncode == 0, upgrade.stdout + upgrade.stderr
        new = serving.in_unit()
        assert new != serving.environment and f"--max-num-seqs {FEWER}" in box.ssh(f"cat {UNIT}").stdout
        assert {new, serving.environment} <= set(serving.environments())
        serving.goes_on()
        assert "STALE" in box.ssh("rigctl status").stdout

        killed = interrupt(box, Point("deploy killed", "Write its units", 0.2), *ROLLBACK)
        assert killed != 0
        rollback = box.run(*ROLLBACK)
        assert rollback.returncode == 0, rollback.stdout + rollback.stderr
        assert rollback.stdout.strip().endswith("rolled back: sandbox")
        assert serving.in_unit() == serving.environment and f"--max-num-seqs {LIMIT}" in box.ssh(f"cat {UNIT}").stdout
        assert box.ssh(f"readlink {BASE}/current").stdout.strip() == serving.environment
        serving.goes_on()
        assert "STALE" not in box.ssh("rigctl status").stdout, "it runs what the host has again"

        verify = box.verify()
        assert verify.returncode == 1 and "rolled back to state" in verify.stdout
        assert "1 failed" in verify.stdout, verify.stdout
        status = box.run("rig", "status", "inventory/sandbox.py")
        assert "rolled back to state" in status.stdout and "a deploy would change environment/" in status.stdout
        refused = box.deploy()
        assert refused.returncode == 1 and "rolled back from this very state" in refused.stderr
        assert "rolled back from this very state" in box.plan().stdout
        assert serving.in_unit() == serving.environment

        box.ssh("systemctl restart kimi-vllm-base")
        serving.pid = serving.main_pid()
        serving.goes_on()

        forward = box.deploy(*FORWARD)
        assert forward.returncode == 0, forward.stdout + forward.stderr
        assert serving.in_unit() == new
        again = box.plan()
        assert again.returncode == 0, again.stdout
        assert "rolled back" not in box.run("rig", "status", "inventory/sandbox.py").stdout


def test_two_earlier_ones_stay_and_never_goes_what_runs(serving: Serving) -> None:
    box = serving.box
    with changed(LOCK, another_lock(3)):
        assert box.deploy().returncode == 0
        third = serving.in_unit()
    with changed(LOCK, another_lock(4)):
        deploy = box.deploy()
        assert deploy.returncode == 0, deploy.stderr
        assert f"{serving.environment} stays: a process or a unit still uses it" in deploy.stdout
        assert len(serving.environments()) == 4
        serving.goes_on()
        box.ssh("systemctl stop kimi-vllm-base")
        assert f"{serving.environment} is no longer needed" in box.plan().stdout
        assert box.deploy().returncode == 0
        left = serving.environments()
        assert len(left) == 3 and serving.environment not in left and {third, serving.in_unit()} < set(left)
        assert box.plan().returncode == 0
        verify = box.verify()
        assert verify.returncode == 0, verify.stdout
