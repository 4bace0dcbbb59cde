"""What README promises: a configuration, a flag of one or of all, a host: one changed file each, and no test minds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rig.artifacts.units import unit_files
from rig.catalog.entries import ROOT, catalogues_of, check_all
from rig.cli.converge import inventory_hosts
from rig.cli.tour import recorded_plan
from tests.support.plans import SHIPPED


def with_key(text: str, name: str, key: str, value: object) -> str:
    """An entry of serving.yaml with a key set, as an editor does it: the line is changed, or added after the name."""
    found = re.search(rf"^{re.escape(name)}:\n(?:[ #].*\n|\n)*", text, re.MULTILINE)
    assert found is not None, f"{name} is not written as a block"
    changed, count = re.subn(rf"(?m)^  {key}:.*$", f"  {key}: {value}", found[0])
    if not count:
        changed = found[0].replace(":\n", f":\n  {key}: {value}\n", 1)
    return text.replace(found[0], changed)


def entries(inventory: Path) -> dict[str, dict[str, Any]]:
    """serving.yaml as it is written."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((inventory / "serving.yaml").read_text())
    return found


def heads(inventory: Path) -> list[str]:
    """The entries that others extend, or that stand alone, of those that a host gets unasked."""
    return [name for name, entry in entries(inventory).items() if not {"extends", "unproved"} & entry.keys()]


def add_a_configuration(inventory: Path) -> Path:
    file = inventory / "serving.yaml"
    file.write_text(f"{file.read_text()}\none-more:\n  extends: {heads(inventory)[0]}\n  flags: {{seed: 1}}\n")
    return file


def change_a_flag_of_one(inventory: Path) -> Path:
    file, first = inventory / "serving.yaml", heads(inventory)[0]
    longer = entries(inventory)[first].get("context_length", 8192) + 1024
    file.write_text(with_key(file.read_text(), first, "context_length", longer))
    return file


def change_a_flag_of_all(inventory: Path) -> Path:
    file = inventory / "serving.yaml"
    text = file.read_text()
    limit = 1 + max(entry.get("max_running_requests", 0) for entry in entries(inventory).values())
    for name in heads(inventory):
        text = with_key(text, name, "max_running_requests", limit)
    file.write_text(text)
    return file


def add_a_host(inventory: Path) -> Path:
    file = inventory / "gpu.py"
    file.write_text(f'{file.read_text()}gpu.append(("one-more", {{"ssh_user": "root"}}))\n')
    return file


EDITS: list[Callable[[Path], Path]] = [add_a_configuration, change_a_flag_of_one, change_a_flag_of_all, add_a_host]


def units(inventory: Path, hosts: Path) -> dict[tuple[str, str], str]:
    """Host and unit -> text: all configurations, on every host of a file."""
    every = {"configurations": None, "enable_at_boot": None, "catalogue_overlay": None, "api_key_file": "/nonexistent"}
    with catalogues_of(inventory):
        return {
            (host["name"], Path(path).name): text
            for host in inventory_hosts(str(hosts))
            for path, text in unit_files(recorded_plan(host["data"] | every)).items()
            if path.endswith(".service")
        }


@pytest.fixture(scope="module")
def shipped() -> dict[tuple[str, str], str]:
    return units(SHIPPED, SHIPPED / "gpu.py")


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit.__name__))
def test_one_file_is_all_that_changes(
    tmp_path: Path, shipped: dict[tuple[str, str], str], edit: Callable[[Path], Path]
) -> None:
    inventory = tmp_path / "inventory"
    shutil.copytree(SHIPPED, inventory)
    file = edit(inventory)
    assert file.read_bytes() != (SHIPPED / file.name).read_bytes()
    check_all(inventory)
    after = units(inventory, (inventory if edit is add_a_host else SHIPPED) / "gpu.py")
    changed = {unit for host, unit in shipped.keys() & after.keys() if shipped[host, unit] != after[host, unit]}
    new = after.keys() - shipped.keys()
    assert not shipped.keys() - after.keys()
    of_heads = [f"kimi-{name}.service" for name in heads(SHIPPED)]
    if edit is add_a_configuration:
        assert {unit for _, unit in new} == {"kimi-one-more.service"} and all("--seed 1" in after[key] for key in new)
    elif edit is add_a_host:
        assert {host for host, _ in new} == {"one-more"} and not changed
    elif edit is change_a_flag_of_one:
        assert not new and changed.intersection(of_heads) == {of_heads[0]}
    else:
        assert not new and changed.issuperset(of_heads)


@pytest.mark.slow
def test_no_test_minds(tmp_path: Path) -> None:
    """The fast unit tests in a copy of the repository with all the edits."""
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    for edit in EDITS:
        edit(copy / "inventory")
    environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy}/files/hostkit"}
    del environment["KIMI_RIG_INVENTORY"]
    myself = f"tests/unit/{Path(__file__).name}"
    options = ["-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not slow", "--ignore", myself]
    command = [sys.executable, "-m", "pytest", *options, "tests/unit"]
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
