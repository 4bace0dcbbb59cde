"""A box that trains; its catalogues are a copy, since a training writes entries into them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.catalog.entries import ROOT
from rig.sandbox.boot import NETWORKS
from tests.sandbox.conftest import DeployBox, bare_box, engine_port

__all__ = ["bare_box", "engine_port"]

NAME = "tiny-drafter"


class TrainingBox(DeployBox):
    """A box and the commands on its training."""

    def deploy(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Two environments with a torch each: longer than other boxes'."""
        return self.run("rig", "deploy", "-v", self.inventory, *options, timeout=3000)

    def train(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """What `make train` runs."""
        return self.run("rig", "train", self.inventory, "--name", NAME, timeout=3000, **environment)

    def rigctl(self, words: str) -> str:
        return self.ssh(f"rigctl {words}").stdout


@pytest.fixture(scope="session")
def networks() -> Iterator[None]:
    """Units of the box may have a network of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NETWORKS, "1")
        yield


@pytest.fixture(scope="session")
def training_box(
    networks: None, bare_box: DeployBox, engine_port: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainingBox]:
    inventory = tmp_path_factory.mktemp("training") / "inventory"
    shutil.copytree(ROOT / "inventory", inventory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMI_RIG_INVENTORY", str(inventory))
        yield TrainingBox(bare_box.box.name, str(inventory / "sandbox_training.py"))


@pytest.fixture(scope="session")
def inventory(training_box: TrainingBox) -> Path:
    return Path(training_box.inventory).parent
