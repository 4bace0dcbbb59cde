"""What README promises: a configuration, a flag of one or of all, a host: one changed file each, and no test minds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def add_a_configuration(inventory: Path) -> Path:
    file = inventory / "serving.yaml"
    first = next(iter(yaml.safe_load(file.read_text())))
    file.write_text(f"{file.read_text()}\none-more:\n  extends: {first}\n  flags: {{seed: 1}}\n")
    return file


def change_a_flag_of_one(inventory: Path) -> Path:
    file = inventory / "serving.yaml"
    first = next(iter(yaml.safe_load(file.read_text())))
    file.write_text(with_key(file.read_text(), first, "context_length", 16384))
    return file


def change_a_flag_of_all(inventory: Path) -> Path:
    file = inventory / "serving.yaml"
    text = file.read_text()
    for name, entry in yaml.safe_load(text).items():
        if "extends" not in entry:
            text = with_key(text, name, "max_running_requests", 128)
    file.write_text(text)
    return file


def add_a_host(inventory: Path) -> Path:
    file = inventory / "gpu.py"
    file.write_text(f'{file.read_text()}gpu.append(("one-more", {{"ssh_user": "root"}}))\n')
    return file


EDITS: list[Callable[[Path], Path]] = [add_a_configuration, change_a_flag_of_one, change_a_flag_of_all, add_a_host]


def units(inventory: Path, hosts: Path) -> dict[str, str]:
    """Host and unit -> text, for all hosts of a file."""
    with catalogues_of(inventory):
        return {
            f"{host['name']} {Path(path).name}": text
            for host in inventory_hosts(str(hosts))
            for path, text in unit_files(recorded_plan(host["data"])).items()
            if path.endswith(".service")
        }


@pytest.fixture(scope="module")
def shipped() -> dict[str, str]:
    return units(SHIPPED, SHIPPED / "gpu.py")


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit.__name__))
def test_one_file_is_all_that_changes(tmp_path: Path, shipped: dict[str, str], edit: Callable[[Path], Path]) -> None:
    inventory = tmp_path / "inventory"
    shutil.copytree(SHIPPED, inventory)
    file = edit(inventory)
    assert file.read_bytes() != (SHIPPED / file.name).read_bytes()
    check_all(inventory)
    after = units(inventory, (inventory if edit is add_a_host else SHIPPED) / "gpu.py")
    changed = {name for name in shipped.keys() & after.keys() if shipped[name] != after[name]}
    new = after.keys() - shipped.keys()
    assert not shipped.keys() - after.keys()
    if edit is add_a_configuration:
        assert new and all("--seed 1" in after[name] for name in new)
    elif edit is add_a_host:
        assert not changed and {name.partition(" ")[0] for name in new} == {"one-more"}
    else:
        entries = sum("fallback" not in name for name in shipped)
        assert not new and (0 < len(changed) < entries if edit is change_a_flag_of_one else len(changed) == entries)


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
