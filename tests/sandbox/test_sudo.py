"""A login with sudo, zsh and umask 077 gets what root gets: same plan, receipt, files, owners and modes."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cli.bench import ledger
from rig.operations.deploy_lock import lock_script
from rigctl.contract import layout
from tests.sandbox.conftest import DeployBox
from tests.support.box import CONFIGURATIONS, PORT

SUDOERS = "etc/sudoers.d/90-kimi-rig"
TIME = re.compile(r'"(since|at)": "[^"]*"')
# All that we make, but for what a package manager's or an engine's caches hold.
# Older versions of rigctl may lie beside the current one.
RIGCTL = f"{layout.HOSTKIT}/current/ $(readlink -f {layout.HOSTKIT}/current/venv)/"
OURS = f"/opt/kimi-rig/env {RIGCTL} {layout.ETC} {layout.STATE} {layout.UNITS} {layout.RIGCTL_LINK} "
OURS += "/etc/sysusers.d /shared /data"
# What services write, below our directories.
WRITTEN = f"{layout.LOGS} {layout.CACHE} {layout.STATE}/serving"
NUMBER = re.compile(r"\d+")
LISTING = f"sudo find {OURS} -path '*/env/.cache/*' -prune -o -printf '%p %y %u %g %m %l\\n' | LC_ALL=C sort"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secrets") / "api-key"
    file.write_text("key-5e1d-never-shown\n")
    file.chmod(0o600)
    return file


def with_key(key: Path) -> list[str]:
    return ["--pyinfra=--data", f"--pyinfra=api_key_file={key}"]


@pytest.fixture(scope="module")
def root_box(bare_box: DeployBox, key: Path) -> DeployBox:
    deploy = bare_box.deploy(*with_key(key))
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    return bare_box


@pytest.fixture(scope="module")
def sudo_box(bare_sudo_box: DeployBox, key: Path) -> DeployBox:
    assert bare_sudo_box.ssh("id -un; umask; echo $SHELL").stdout.split() == ["ubuntu", "077", "/usr/bin/zsh"]
    deploy = bare_sudo_box.deploy(*with_key(key))
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    assert deploy.stdout.strip().endswith("converged: sandbox-sudo")
    return bare_sudo_box


@pytest.fixture
def sudo_asks(bare_sudo_box: DeployBox) -> Iterator[None]:
    """sudo wants a password in the box."""
    file = bare_sudo_box.box.root / SUDOERS
    before = file.read_text()
    file.write_text(before.replace("NOPASSWD:", ""))
    yield
    file.write_text(before)


def test_a_sudo_that_asks_for_a_password_is_refused_in_one_sentence(bare_sudo_box: DeployBox, sudo_asks: None) -> None:
    begun = time.monotonic()
    for run in (bare_sudo_box.plan(), bare_sudo_box.run("rig", "uninstall", bare_sudo_box.inventory, "--yes")):
        assert run.returncode == 1
        assert "sandbox-sudo: sudo refuses ubuntu without a password (a password is required): give" in run.stderr
        assert "Traceback" not in run.stderr
    assert time.monotonic() - begun < 120


def test_a_login_that_is_not_root_and_does_not_say_sudo_is_refused(bare_sudo_box: DeployBox) -> None:
    plan = bare_sudo_box.plan("--pyinfra=--data", "--pyinfra=_sudo=false")
    assert plan.returncode == 1
    assert 'ubuntu is not root: set "_sudo": True' in plan.stderr


def test_plan_and_verification(sudo_box: DeployBox, key: Path) -> None:
    plan = sudo_box.plan(*with_key(key))
    assert plan.returncode == 0, plan.stdout + plan.stderr
    # Another box on this computer may serve on the same port: told as a note.
    assert plan.stdout.splitlines()[0] == "sandbox-sudo: nothing to do"


def test_receipts_are_equal_but_for_times(root_box: DeployBox, sudo_box: DeployBox) -> None:
    receipts = [TIME.sub(r'"\1": ""', box.ssh(f"cat {layout.RECEIPT}").stdout) for box in (root_box, sudo_box)]
    assert receipts[0] == receipts[1]
    assert '"unit/kimi-vllm-base.service"' in receipts[0]


def test_owners_modes_and_paths_are_equal(root_box: DeployBox, sudo_box: DeployBox) -> None:
    listings = [set(box.ssh(LISTING).stdout.splitlines()) for box in (root_box, sudo_box)]
    assert len(listings[0]) > 1000
    assert not listings[0] ^ listings[1], sorted(listings[0] ^ listings[1])[:20]
    records = [set(box.ssh(f"cat {layout.CREATED}").stdout.splitlines()) for box in (root_box, sudo_box)]
    assert records[0] == records[1]


def test_rigctl_answers_the_login_without_sudo(root_box: DeployBox, sudo_box: DeployBox) -> None:
    rows = [json.loads(box.ssh("rigctl status --json").stdout) for box in (root_box, sudo_box)]
    assert len(rows[1]) == len(CONFIGURATIONS)
    assert rows[0] == rows[1]


@pytest.mark.long
def test_serving_and_its_logs_are_equal(root_box: DeployBox, sudo_box: DeployBox, engine_port: None) -> None:
    """One box after the other: they share this computer's ports."""
    seen = []
    for box in (root_box, sudo_box):
        box.ssh("sudo systemctl start kimi-vllm-base")
        answer = json.loads(box.ssh("sudo rigctl chat --json 'What is a token?'").stdout)
        [row] = [row for row in json.loads(box.ssh("rigctl status --json").stdout) if row["state"] == "active"]
        left = box.ssh(f"sudo find {WRITTEN} -maxdepth 2 -printf '%p %y %u %g %m\\n' | LC_ALL=C sort").stdout
        journal, run = (box.ssh(f"sudo rigctl logs vllm-base {how}").stdout for how in ("", "--run 1"))
        box.ssh("sudo systemctl stop kimi-vllm-base")
        assert "accept" in journal and len(run.splitlines()) > 10
        arguments = [NUMBER.sub("0", line) for line in run.splitlines() if "non-default args" in line]
        assert arguments
        seen.append((answer["content"], row["name"], row["release"], NUMBER.sub("0", left).splitlines(), arguments))
    assert seen[0] == seen[1]


@pytest.mark.long
def test_the_benchmark_gives_the_same(
    root_box: DeployBox, sudo_box: DeployBox, engine_port: None, tmp_path: Path
) -> None:
    """All of a result but times and speeds."""
    seen = []
    for box in (root_box, sudo_box):
        kept = tmp_path / box.box.name
        where = ["--ledger", str(kept), "--out", str(kept / "report")]
        run = box.run("rig", "bench", "run", box.inventory, "--configs", "vllm-base", *where, timeout=1800)
        assert run.returncode == 0, run.stdout + run.stderr
        results = [*ledger.results(ledger.read(kept))]
        assert results and {one.status for one in results} == {"measured"}
        seen.append([told(one) for one in results])
    assert seen[0] == seen[1]


def told(result: ledger.Result) -> str:
    """What a result says, without when and how fast."""
    whole = result.model_dump(exclude={"id", "at", "host", "rounds", "warmup_rounds", "warmup_stable", "profile"})
    rounds = [(one.requests, one.errors, one.prompt_tokens, one.output_tokens) for one in result.rounds]
    return TIME.sub(r'"\1": ""', json.dumps([whole, rounds], sort_keys=True))


def test_secrets_are_roots_alone(sudo_box: DeployBox) -> None:
    assert sudo_box.ssh(f"cat {layout.CREDENTIALS}/api-key", check=False).returncode != 0
    stored = sudo_box.ssh(f"sudo cat {layout.CREDENTIALS}/api-key; sudo stat -c '%a %U' {layout.CREDENTIALS}/api-key")
    assert stored.stdout == "key-5e1d-never-shown600 root\n"
    assert "key-5e1d" not in sudo_box.ssh("sudo grep -rl key-5e1d /tmp /home /var/lib/kimi-rig; true").stdout


def test_one_deploy_at_a_time(sudo_box: DeployBox) -> None:
    quoted = lock_script("somebody@elsewhere (process 1)").replace("'", "'\\''")
    holder = subprocess.Popen(
        sudo_box.box.ssh_command(f"sudo sh -c '{quoted}'"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        refused = sudo_box.deploy()
        assert refused.returncode == 1
        assert "another deploy is at work on this host: somebody@elsewhere (process 1), for" in refused.stderr
    finally:
        holder.kill()
        holder.wait()


def test_without_the_key_it_converges_and_verifies(sudo_box: DeployBox) -> None:
    assert sudo_box.deploy().returncode == 0
    verify = sudo_box.verify()
    assert verify.returncode == 0, verify.stdout


def test_status_and_the_lines_to_talk_to_it(sudo_box: DeployBox) -> None:
    status = sudo_box.run("rig", "status", sudo_box.inventory)
    found = "sandbox-sudo: nothing serves, drift: none, reboot pending: no, disk: / [\\d.,]+ GB free of [\\d.,]+ GB\n"
    assert status.returncode == 0 and re.fullmatch(found, status.stdout), status.stdout + status.stderr
    sudo_box.ssh(f"sudo rm {layout.UNITS}/kimi-vllm-base.service")
    drifted = sudo_box.run("rig", "status", sudo_box.inventory, "--json")
    [row] = json.loads(drifted.stdout)
    assert row["drift"] == [f"{layout.UNITS}/kimi-vllm-base.service is missing"]
    deploy = sudo_box.deploy()
    assert "sudo systemctl start kimi-vllm-base.service" in deploy.stdout
    assert f"curl -sS http://127.0.0.1:{PORT}/v1/chat/completions" in deploy.stdout
