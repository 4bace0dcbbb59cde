"""The wrapper's exit codes: every way in which pyinfra itself would say 0 without having done the work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rig.bench.sweeps import generator_path
from rig.catalog.entries import ROOT
from rig.cli.arguments import CONVERGED, FAILED, REBOOT_PENDING, USAGE, WOULD_CHANGE
from rig.cli.converge import Change, Plan, asked_hosts
from tests.support.plans import GROUP_DATA

pytestmark = pytest.mark.slow

GPU_DATA = ["--pyinfra=--group-data", f"--pyinfra={GROUP_DATA}"]


def wrapper(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rig", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)


def inventory(tmp_path: Path, *hosts: tuple[str, dict[str, object]]) -> str:
    path = tmp_path / "hosts.py"
    path.write_text(f"gpu = {list(hosts)!r}\n")
    return str(path)


def fake(name: str, **more: object) -> tuple[str, dict[str, object]]:
    responses = {"/etc/os-release": {"stdout": ["os ubuntu-24.04", "machine x86_64"]}, **more}
    return f"@fake/{name}", {"fake_delay": 0, "fake_delay_jitter": 0, "fake_responses": responses}


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("verb", ["plan", "deploy"])
def test_a_mistyped_inventory(verb: str) -> None:
    result = wrapper(verb, "inventory/gpuu.py")
    assert result.returncode == FAILED
    assert "there is no inventory file inventory/gpuu.py" in result.stderr


@pytest.mark.parametrize("verb", ["plan", "deploy"])
def test_a_limit_that_matches_nothing(verb: str, tmp_path: Path) -> None:
    result = wrapper(verb, inventory(tmp_path, fake("one")), "--limit", "two", *GPU_DATA)
    assert result.returncode == FAILED
    assert "--limit two matches no host" in result.stderr and "@fake/one" in result.stderr


@pytest.mark.parametrize("verb", ["plan", "deploy"])
def test_a_host_that_does_not_resolve(verb: str, tmp_path: Path) -> None:
    result = wrapper(verb, inventory(tmp_path, ("kimi-1.invalid", {"ssh_user": "root"})), *GPU_DATA)
    assert result.returncode == FAILED
    assert "kimi-1.invalid" in result.stderr


@pytest.mark.parametrize("verb", ["plan", "deploy"])
def test_one_of_two_hosts_refuses_the_connection(verb: str, tmp_path: Path) -> None:
    refusing = ("127.0.0.1", {"ssh_port": closed_port(), "ssh_user": "root"})
    result = wrapper(verb, inventory(tmp_path, fake("one"), refusing), *GPU_DATA)
    assert result.returncode == FAILED
    assert "127.0.0.1" in result.stderr


def test_a_sandbox_that_is_not_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rig", "plan", "inventory/sandbox.py"]
    environment = {**os.environ, "KIMI_RIG_SANDBOX_DIR": str(tmp_path / "nothing")}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert result.returncode == FAILED
    assert "`make sandbox` makes" in result.stderr and "Traceback" not in result.stderr


def test_an_inventory_without_hosts(tmp_path: Path) -> None:
    result = wrapper("plan", inventory(tmp_path))
    assert result.returncode == FAILED
    assert "names no host" in result.stderr


def test_an_inventory_that_prints(tmp_path: Path) -> None:
    path = tmp_path / "hosts.py"
    path.write_text('print("hello")\ngpu = ["@fake/one"]\n')
    result = wrapper("plan", str(path))
    assert result.returncode == FAILED
    assert "prints something of its own" in result.stderr and "Traceback" not in result.stderr


def test_a_plan_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    arguments = [inventory(tmp_path, fake("one")), *GPU_DATA]
    result = wrapper("plan", *arguments, "--json", str(tmp_path / "hosts.py" / "plan.json"))
    assert result.returncode == FAILED
    assert "plan.json cannot be written" in result.stderr and "Traceback" not in result.stderr
    assert "@fake/one: " in result.stdout


@pytest.mark.parametrize("verb", ["plan", "explain"])
@pytest.mark.parametrize("limit", ["--help", """it's a$b "c`d'; exit 0; echo '"""])
def test_make_hands_on_what_is_typed(verb: str, limit: str) -> None:
    command = ["make", "-o", ".venv/run", f"BIN={Path(sys.executable).parent}", verb, f"LIMIT={limit}"]
    environment = {**os.environ, "MAKEFLAGS": ""}
    result = subprocess.run(
        [*command, "INVENTORY=inventory/tour.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert f"--limit {limit} matches no host of inventory/tour.py" in result.stderr
    assert result.returncode != 0


def test_a_broken_inventory_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.py"
    path.write_text("gpu = [unknown]\n")
    result = wrapper("plan", str(path))
    assert result.returncode == FAILED
    assert "cannot be read" in result.stderr


def test_a_failing_operation_fails_the_deploy(tmp_path: Path) -> None:
    failing = {"systemd-sysusers": {"success": False, "stderr": "no room"}}
    host = ("@fake/one", {**fake("one", **failing)[1], "configurations": []})
    result = wrapper("deploy", inventory(tmp_path, host), *GPU_DATA)
    assert result.returncode == FAILED
    assert "[@fake/one] no room\n" in result.stderr
    assert "the next run goes on where this one ended" in result.stderr


def test_a_deploy_keeps_the_load_generator(tmp_path: Path) -> None:
    asked = f"--current={generator_path('/opt/kimi-rig/env')} --list"
    answers = {asked: {"stdout": ["unneeded /opt/kimi-rig/env/old"]}}
    host = ("@fake/one", {**fake("one", **answers)[1], "configurations": []})
    result = wrapper("plan", inventory(tmp_path, host), *GPU_DATA)
    assert "/opt/kimi-rig/env/old is no longer needed" in result.stdout


def test_what_the_plan_refuses_is_not_begun(tmp_path: Path) -> None:
    result = wrapper("deploy", inventory(tmp_path, fake("one")), *GPU_DATA)
    assert result.returncode == FAILED
    assert "refused, nothing was changed on any host:" in result.stderr
    assert "@fake/one: checkpoint custom-drafter is not at /data/eagle3/output_10k/4" in result.stderr
    assert "Starting operation" not in result.stderr + result.stdout


def test_an_inventory_as_it_came(tmp_path: Path) -> None:
    result = wrapper("plan", inventory(tmp_path, ("kimi-1.example.com", {"ssh_user": "root"})))
    assert result.returncode == FAILED
    assert "still names the example host kimi-1.example.com" in result.stderr and "Connecting" not in result.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"configurations": ["vllm-bas"]}, "vllm-bas is not in serving.yaml"),
        ({"enable_at_boot": "vllm-bas"}, "vllm-bas is none of this host's configurations"),
        ({"models": "shared"}, "models: "),
        ({"api_key_file": "/nowhere/key"}, "/nowhere/key cannot be read"),
    ],
)
def test_wrong_values_of_host_data_are_told_without_a_connection(
    data: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "group_data").symlink_to(GROUP_DATA)
    result = wrapper("plan", inventory(tmp_path, ("kimi-1.invalid", data)))
    assert result.returncode == FAILED
    assert words in result.stderr and "Connecting" not in result.stderr and "Traceback" not in result.stderr


def test_a_deploy_that_changes_nothing_for_good_is_no_success(tmp_path: Path) -> None:
    """The fake host says yes to every command and keeps nothing: the plan after the deploy finds that out."""
    result = wrapper("deploy", inventory(tmp_path, ("@fake/one", {**fake("one")[1], "configurations": []})), *GPU_DATA)
    assert result.returncode == FAILED
    assert "not converged, this is left to do" in result.stderr


def test_an_interrupt_is_a_failure(tmp_path: Path) -> None:
    slow = ("@fake/one", {**fake("one")[1], "fake_delay": 3})
    command = [sys.executable, "-m", "rig", "deploy", inventory(tmp_path, slow), *GPU_DATA]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(4)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == FAILED
    assert "interrupted" in errors or "exit code is" in errors or "not converged" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_killed_wrapper_leaves_nothing_at_work(tmp_path: Path) -> None:
    slow = ("@fake/one", {**fake("one")[1], "fake_delay": 30})
    command = [sys.executable, "-m", "rig", "deploy", inventory(tmp_path, slow), *GPU_DATA]
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("details: ")
    while not (children := process.children()):
        time.sleep(0.1)
    process.kill()
    # The fake host would answer for minutes.
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive and process.wait() == -signal.SIGKILL


def test_wrong_usage_is_not_would_change() -> None:
    for arguments in (["plan"], ["plan", "inventory/sandbox.py", "--limt", "x"], ["pln", "inventory/sandbox.py"]):
        assert wrapper(*arguments).returncode == USAGE


@pytest.mark.parametrize("verb", ["plan", "deploy"])
def test_a_mistyped_key_of_host_data(verb: str, tmp_path: Path) -> None:
    in_inventory = wrapper(verb, inventory(tmp_path, ("kimi-1", {"enable_on_boot": "vllm-base"})))
    assert in_inventory.returncode == FAILED
    assert (
        "kimi-1: host data (inventory/group_data/all.py lists it): there is no key enable_on_boot"
        in in_inventory.stderr
    )
    assert 'did you mean "enable_at_boot"?' in in_inventory.stderr and "Connecting" not in in_inventory.stderr
    option = wrapper(verb, inventory(tmp_path, fake("one")), *GPU_DATA, "--pyinfra=--data", "--pyinfra=restrat=now")
    assert option.returncode == FAILED
    assert 'there is no key restrat, did you mean "restart"?' in option.stderr


def test_a_plan_of_a_bare_host_lists_what_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    result = wrapper("plan", inventory(tmp_path, fake("one")), "--json", str(target), *GPU_DATA)
    # Checkpoints that can only be put there by hand are refusals, all listed at once.
    assert result.returncode == FAILED
    assert "refused: checkpoint custom-drafter is not at /data/eagle3/output_10k/4" in result.stdout
    assert "packages to install: binutils, ca-certificates, ccache, curl" in result.stdout
    assert target.exists()


def test_a_unit_that_starts_at_boot_and_is_stopped_is_told(tmp_path: Path) -> None:
    shown = ["Id=kimi-vllm-base.service", "LoadState=loaded", "ActiveState=inactive", "UnitFileState=enabled"]
    data = [*GPU_DATA, "--pyinfra=--data", "--pyinfra=enable_at_boot=vllm-base"]
    host = fake("one", **{"systemctl show --property": {"stdout": shown}})
    told = "note: kimi-vllm-base.service starts at boot and is stopped: a deploy starts nothing"
    assert told in wrapper("plan", inventory(tmp_path, host), *data).stdout
    assert told not in wrapper("plan", inventory(tmp_path, host), *GPU_DATA).stdout


def test_exit_codes_of_a_plan() -> None:
    change = Change("a", "Install packages", ["packages to install: x"])
    refusal = Change("a", "Stage", ["refused: not there"])
    assert Plan(["a"], []).exit_code(WOULD_CHANGE) == CONVERGED
    assert Plan(["a"], [change]).exit_code(WOULD_CHANGE) == WOULD_CHANGE
    assert Plan(["a"], [change, refusal]).exit_code(WOULD_CHANGE) == FAILED
    assert Plan(["a"], [], {"a": "kernel"}).exit_code(WOULD_CHANGE) == REBOOT_PENDING
    assert Plan(["a"], [change], {"a": "kernel"}).exit_code(FAILED) == FAILED


def test_limits_follow_pyinfras_rules(tmp_path: Path) -> None:
    hosts = inventory(tmp_path, fake("one"), fake("two"))
    assert asked_hosts(hosts, ["@fake/t*"]) == ["@fake/two"]
    assert asked_hosts(hosts, ["gpu"]) == ["@fake/one", "@fake/two"]
