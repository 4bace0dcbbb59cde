"""The life of a real box: a throw-away one, made, hurt, restarted and deleted. Needs root; about 75 s."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.sandbox import Box, boot
from rig.sandbox.box import REPOSITORY
from rig.sandbox.limits import IN_BOX
from tests.support.leftovers import Watcher

NAME = "boxtest"


@dataclass(frozen=True)
class Tool:
    """The tool on the box under test, as its user calls it."""

    box: Box
    environment: dict[str, str]
    wheels: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rig", "sandbox", "--name", NAME, *arguments]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def ssh(self, *command: str) -> str:
        done = self("ssh", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def build_and_kill(tool: Tool) -> None:
    """Start making the box and kill that in the middle, build tool and all."""
    making = subprocess.Popen(
        tool.command("up"),
        cwd=REPOSITORY,
        env=tool.environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not (tool.box.root / "var/lib/dpkg").is_dir() and making.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(making.pid, signal.SIGKILL)
    making.wait()
    assert tool.box.root.is_dir()
    assert not tool.box.stamp.exists()


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory, watcher: Watcher) -> Iterator[Tool]:
    assert os.geteuid() == 0, "a box needs root: run these tests with sudo"
    base = tmp_path_factory.mktemp("boxes")
    wheels = tmp_path_factory.mktemp("wheels")
    (wheels / "some.whl").touch()
    environment = os.environ | {
        "KIMI_RIG_SANDBOX_DIR": str(base),
        "KIMI_RIG_SANDBOX_PORT": str(free_port()),
        "PIP_FIND_LINKS": str(wheels),
    }
    tool = Tool(Box(NAME, base), environment, wheels)
    with watcher.afterwards(tool.command("rm"), KIMI_RIG_SANDBOX_DIR=str(base)):
        try:
            build_and_kill(tool)
            made = tool("up")
            assert made.returncode == 0, made.stderr
            assert "half-made root found" in made.stdout
            yield tool
        finally:
            removed = tool("rm")
    assert removed.returncode == 0, removed.stderr
    assert not base.exists()
    assert boot.nspawn(tool.box) is None
    assert not any(group.exists() for group in boot.own_cgroups(tool.box))


def test_up_again_is_quick_and_changes_nothing(tool: Tool) -> None:
    before = tool.box.state()
    begin = time.monotonic()
    again = tool("up")
    elapsed = time.monotonic() - begin
    assert (again.returncode, "already running" in again.stdout) == (0, True)
    assert elapsed < 1
    assert tool.box.state() == before


def test_ssh_hands_through_streams_quotes_and_exit_status(tool: Tool) -> None:
    done = tool("ssh", """printf '%s\\n' "it's  two" | tr a-z A-Z; echo seen >&2; exit 7""")
    assert (done.returncode, done.stdout, done.stderr) == (7, "IT'S  TWO\n", "seen\n")
    assert tool.ssh("printf", "[%s]", "a  b", "$HOME", "'") == "[a  b][$HOME][']"


def test_it_is_a_real_machine_without_the_clock(tool: Tool) -> None:
    assert tool.ssh("cat /proc/1/comm; hostname; systemctl is-system-running").split() == [
        "systemd",
        NAME,
        "running",
    ]
    bounding = int(tool.ssh("awk '/CapBnd/ {print $2}' /proc/1/status"), 16)
    assert not bounding >> 25 & 1, "CAP_SYS_TIME: the box could set the computer's clock"


def test_host_key_is_checked(tool: Tool, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    port = tool.box.state().port
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {(tmp_path / 'other.pub').read_text()}")
    command = tool.box.ssh_command("true")
    command[1:1] = ["-o", f"UserKnownHostsFile={tmp_path / 'known'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 255
    assert "HOST IDENTIFICATION HAS CHANGED" in done.stderr


def test_sshd_listens_on_loopback_alone(tool: Tool) -> None:
    listening = tool.ssh("ss -Htln").splitlines()
    assert [line.split()[3] for line in listening if line.split()[3].endswith(f":{tool.box.state().port}")] == [
        f"127.0.0.1:{tool.box.state().port}"
    ]


def test_pyinfra_reaches_it_from_a_home_without_ssh_directory(tool: Tool, tmp_path: Path) -> None:
    inventory = tmp_path / "here.py"
    inventory.write_text(f"from rig.sandbox import Box as _Box\nhere = [('{NAME}', _Box('{NAME}').host_data())]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", str(inventory), "fact", "server.Hostname"],
        cwd=REPOSITORY,
        env=tool.environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f'"{NAME}": "{NAME}"' in done.stdout + done.stderr


def test_wheels_are_seen_read_only_by_commands_and_services(tool: Tool) -> None:
    for line in ("env", "systemd-run --quiet --wait --pipe env"):
        seen = dict(text.split("=", 1) for text in tool.ssh(line).splitlines())
        assert str(tool.wheels) in seen["PIP_FIND_LINKS"].split()
        assert str(tool.wheels) in seen["UV_FIND_LINKS"].split(",")
    assert tool.ssh("ls", str(tool.wheels)) == "some.whl"
    assert tool("ssh", f"touch {tool.wheels}/x").returncode != 0


def test_limits_are_judged_and_known_in_the_box(tool: Tool) -> None:
    document = json.loads(tool.box.limits.read_text())
    assert document == json.loads(tool.ssh(f"cat {IN_BOX}"))
    found = {name: result["enforced"] for name, result in document["limits"].items()}
    # What namespaces and seccomp do holds in every box; memory and tasks depend on the computer.
    assert all(found[name] for name in ("RestrictAddressFamilies", "ProtectSystem", "PrivateUsers")), found
    assert isinstance(found["MemoryMax"], bool)
    assert document["clock"] is False


def test_it_comes_back_from_a_reboot(tool: Tool) -> None:
    before = boot.leader(tool.box)
    tool("ssh", "systemctl reboot")
    end = time.monotonic() + 20
    while boot.leader(tool.box) in (before, None) and time.monotonic() < end:
        time.sleep(0.2)
    assert tool("up").returncode == 0
    assert boot.leader(tool.box) not in (before, None)
    assert tool.ssh("systemctl is-system-running --wait") == "running"


def test_box_killed_from_outside_is_started_again(tool: Tool) -> None:
    outer, orphan = boot.nspawn(tool.box), boot.leader(tool.box)
    assert outer is not None
    assert orphan is not None
    os.kill(outer.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert tool("status").returncode == 1
    up = tool("up")
    assert up.returncode == 0, up.stderr
    assert boot.start_time(orphan.pid) != orphan.started
    assert tool.ssh("cat /proc/1/comm") == "systemd"


def test_port_of_a_stranger_is_refused_and_the_stranger_lives(tool: Tool) -> None:
    assert tool("stop").returncode == 0
    assert "not running" in tool("stop").stdout
    with socket.create_server(("127.0.0.1", tool.box.state().port), reuse_port=False):
        refused = tool("up")
    assert refused.returncode == 1
    assert f"in use by pid {os.getpid()} " in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert tool("up").returncode == 0
