"""A box of the tests' own, so that nobody's sandbox is touched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rig.sandbox import Box
from tests.support.box import PORT
from tests.support.leftovers import Watcher


class DeployBox:
    """A box and the commands that people use on it."""

    def __init__(self, name: str = "sandbox", inventory: str = "inventory/sandbox.py") -> None:
        self.box = Box(name)
        self.inventory = inventory

    def ssh(self, command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the box."""
        result = subprocess.run(self.box.ssh_command(command), capture_output=True, text=True, check=False)
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result

    def run(self, *arguments: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a module of the repository as make does."""
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={**os.environ, **environment},
        )

    def deploy(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("rig", "deploy", "-v", self.inventory, *options)

    def plan(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("rig", "plan", self.inventory, *options)

    def verify(self) -> subprocess.CompletedProcess[str]:
        return self.run("pytest", "-q", "-p", "no:cacheprovider", "tests/host", "--inventory", self.inventory)


@pytest.fixture(scope="session")
def bare_box(watcher: Watcher) -> Iterator[DeployBox]:
    """A booted box that has nothing yet; deleted at the end unless KIMI_RIG_KEEP_BOX is set."""
    base = Path(os.environ.get("KIMI_RIG_TEST_BOX_DIR", ROOT / ".sandbox" / "tests"))
    os.environ["KIMI_RIG_SANDBOX_DIR"] = str(base)
    os.environ["KIMI_RIG_SANDBOX_PORT"] = os.environ.get("KIMI_RIG_TEST_BOX_PORT", "2322")
    deploy_box = DeployBox()
    with removed(deploy_box, watcher):
        up = deploy_box.run("rig", "sandbox", "up")
        assert up.returncode == 0, up.stdout + up.stderr
        yield deploy_box


@pytest.fixture(scope="session")
def engine_port() -> None:
    """For tests that start the sandbox's engine: boxes share this computer's network."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            why = f"port {PORT} is taken by the engine of a sandbox: `make sandbox-stop`, then again"
            pytest.exit(why, returncode=1)


@pytest.fixture(scope="session")
def bare_sudo_box(bare_box: DeployBox, watcher: Watcher) -> Iterator[DeployBox]:
    """A second box, on the next port, whose login is `ubuntu`: sudo without a password, zsh, umask 077."""
    box = DeployBox("sandbox-sudo", "inventory/sandbox_sudo.py")
    port = str(int(os.environ["KIMI_RIG_SANDBOX_PORT"]) + 1)
    with removed(box, watcher):
        up = box.run("rig", "sandbox", "--name", box.box.name, "up", "--user", "ubuntu", KIMI_RIG_SANDBOX_PORT=port)
        assert up.returncode == 0, up.stdout + up.stderr
        yield box


@contextmanager
def removed(box: DeployBox, watcher: Watcher) -> Iterator[None]:
    """Remove a box after the block, also when the run is killed."""
    if os.environ.get("KIMI_RIG_KEEP_BOX"):
        yield
        return
    arguments = ("rig", "sandbox", "--name", box.box.name, "rm")
    directory = os.environ["KIMI_RIG_SANDBOX_DIR"]
    with watcher.afterwards([sys.executable, "-m", *arguments], KIMI_RIG_SANDBOX_DIR=directory):
        yield
        done = box.run(*arguments)
        assert done.returncode == 0, done.stderr
