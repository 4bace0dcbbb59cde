"""A box that the previous version deploys, and this one after it.

KIMI_RIG_UPGRADE_FROM=commit: another previous version than CHANGELOG.md's last. KIMI_RIG_KEEP_BOX: the box stays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rig.catalog.entries import ROOT
from rig.sandbox import Box
from tests.sandbox.conftest import DeployBox, engine_port, removed
from tests.support.box import PORT
from tests.support.leftovers import Watcher
from tests.upgrade.changelog import previous

__all__ = ["engine_port"]

INVENTORY = "inventory/sandbox.py"
HOST_DATA = Path("inventory/group_data/sandbox.py")
EDGE_PORT = PORT + 443
KEY = "key-7c2e-never-shown"


@dataclass(frozen=True)
class Previous:
    """The previous version. Only its make is known: its modules may have other names."""

    directory: Path

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH"}
        return subprocess.run(
            ["make", "--silent", "-C", str(self.directory), target, f"INVENTORY={INVENTORY}"],
            env={name: value for name, value in os.environ.items() if name not in outer},
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )


@dataclass(frozen=True)
class Tree:
    """This version in a directory, and the interpreter that it runs in."""

    directory: Path
    python: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module of this version as its make does."""
        return subprocess.run(
            [self.python, "-m", *arguments],
            cwd=self.directory,
            # The interpreter may know another tree's rigctl.
            env={**os.environ, "PYTHONPATH": f"{self.directory / 'files/hostkit'}:{self.directory}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )

    def plan(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("rig", "plan", INVENTORY, *options)

    def deploy(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("rig", "deploy", "-v", INVENTORY, *options)

    def changes(self) -> list[dict[str, Any]]:
        """What a plain pyinfra run changes."""
        done = succeeded(self.run("pyinfra", INVENTORY, "deploy.py", "--json", "-y"))
        return [row for row in json.loads(done.stdout)["results"]["operations"] if row["success"]]

    def verify(self) -> subprocess.CompletedProcess[str]:
        return self.run("pytest", "-q", "-p", "no:cacheprovider", "tests/host", "--inventory", INVENTORY)


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def short_directory() -> Iterator[Path]:
    """pytest's own have paths too long for the sockets of OpenSSH's shared connections."""
    with tempfile.TemporaryDirectory(prefix="kimi-rig-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def edge(short_directory: Path) -> str:
    """A line of host data: an edge with TLS of the host's own authority, and a client's key."""
    file = short_directory / "alice.key"
    file.touch(0o600)
    file.write_text(KEY)
    tls = {"authority": ["localhost", "127.0.0.1"]}
    data = {"address": "127.0.0.1", "port": EDGE_PORT, "tls": tls, "keys": {"alice": str(file)}}
    return f"edge = {data!r}\n"


@pytest.fixture(scope="session")
def previous_tree(short_directory: Path, edge: str) -> Previous:
    """The previous version with an environment of its own, and an edge in its host data."""
    commit = os.environ.get("KIMI_RIG_UPGRADE_FROM") or previous().commit
    directory = short_directory / "previous"
    for command in (
        ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(directory)],
        ["git", "-C", str(directory), "checkout", "--quiet", "--detach", commit],
    ):
        succeeded(subprocess.run(command, capture_output=True, text=True, check=False))
    append(edge, directory)
    return Previous(directory)


@pytest.fixture(scope="session")
def this_tree(short_directory: Path, edge: str) -> Tree:
    """This version, and an edge in its host data."""
    found = copied(short_directory / "this")
    append(edge, found.directory)
    return found


@pytest.fixture(scope="session")
def kept_data_tree(previous_tree: Previous, short_directory: Path) -> Tree:
    """This version with the hosts and the host data of the previous one: what an operator brings along."""
    found = copied(short_directory / "kept")
    for name in ("gpu.py", "sandbox.py", "group_data"):
        source, goal = previous_tree.directory / "inventory" / name, found.directory / "inventory" / name
        if source.is_dir():
            shutil.copytree(source, goal, dirs_exist_ok=True)
        else:
            shutil.copy2(source, goal)
    return found


def append(line: str, directory: Path) -> None:
    with (directory / HOST_DATA).open("a", encoding="utf-8") as data:
        data.write(f"\n{line}")


def copied(directory: Path) -> Tree:
    """This version in a directory."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in files:
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return Tree(directory, sys.executable)


@pytest.fixture(scope="session")
def box(engine_port: None, watcher: Watcher) -> Iterator[Box]:
    """A booted box that has nothing yet, apart from everyone else's."""
    os.environ["KIMI_RIG_SANDBOX_DIR"] = str(ROOT / ".sandbox" / "upgrade")
    os.environ["KIMI_RIG_SANDBOX_PORT"] = os.environ.get("KIMI_RIG_TEST_UPGRADE_PORT", "2324")
    found = DeployBox()
    with removed(found, watcher):
        succeeded(found.run("rig", "sandbox", "up", timeout=1800))
        yield found.box
