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
from tests.sandbox.conftest import engine_port
from tests.upgrade.changelog import previous

__all__ = ["engine_port"]

INVENTORY = "inventory/sandbox.py"


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
def previous_tree(short_directory: Path) -> Previous:
    """The previous version with an environment of its own."""
    commit = os.environ.get("KIMI_RIG_UPGRADE_FROM") or previous().commit
    directory = short_directory / "previous"
    for command in (
        ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(directory)],
        ["git", "-C", str(directory), "checkout", "--quiet", "--detach", commit],
    ):
        succeeded(subprocess.run(command, capture_output=True, text=True, check=False))
    return Previous(directory)


@pytest.fixture(scope="session")
def this_tree() -> Tree:
    return Tree(ROOT, sys.executable)


@pytest.fixture(scope="session")
def kept_data_tree(this_tree: Tree, previous_tree: Previous, short_directory: Path) -> Tree:
    """This version with the hosts and the host data of the previous one: what an operator brings along."""
    directory = short_directory / "kept"
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in files:
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    for name in ("gpu.py", "sandbox.py", "group_data"):
        source, goal = previous_tree.directory / "inventory" / name, directory / "inventory" / name
        if source.is_dir():
            shutil.copytree(source, goal, dirs_exist_ok=True)
        else:
            shutil.copy2(source, goal)
    return Tree(directory, this_tree.python)


@pytest.fixture(scope="session")
def box(this_tree: Tree, engine_port: None) -> Iterator[Box]:
    """A booted box that has nothing yet, apart from everyone else's."""
    os.environ["KIMI_RIG_SANDBOX_DIR"] = str(ROOT / ".sandbox" / "upgrade")
    os.environ["KIMI_RIG_SANDBOX_PORT"] = os.environ.get("KIMI_RIG_TEST_UPGRADE_PORT", "2324")
    found = Box()
    succeeded(this_tree.run("rig", "sandbox", "up"))
    yield found
    if not os.environ.get("KIMI_RIG_KEEP_BOX"):
        succeeded(this_tree.run("rig", "sandbox", "rm"))
