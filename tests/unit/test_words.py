"""What an operator reads of a wrong value: never a regular expression, Python's names of types, or a web address."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rig.bench import ledger
from rig.bench.sweeps import load_sweeps
from rig.catalog.entries import ROOT
from rig.catalog.yaml_source import CatalogError
from rig.facts.state import Privilege
from rig.host.evidence import parse
from rig.host.settings import HostSettings
from rig.plan.host_plan import HostData, host_plan
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.kernel_job import GitSource
from rigctl.contract.order import SHAPES, ContractError
from rigctl.errors import RigctlError
from rigctl.kernel.source import checkout
from tests.support.plans import data

DATA = data()
ROOMS = ("rig", "tasks", "files/hostkit/rigctl")
PYTHONISH = re.compile(r"should match pattern|instance of|pydantic|Value error|validation error|tag using|\^\[")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def own_words(text: str) -> list[int]:
    """Lines where a ValidationError is caught by a name, and not put into words by the contract's functions."""
    caught = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and node.type
        and node.name
        and "ValidationError" in ast.unparse(node.type)
    ]
    return [node.lineno for node in caught if not {"faults", "words"} & {*re.findall(r"\w+", ast.unparse(node))}]


def test_every_fault_of_a_model_is_put_into_words_by_the_contract() -> None:
    assert own_words("try: x()\nexcept ValidationError as error:\n    raise Wrong(str(error))") == [2]
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    wrong = [f"{path}:{line}" for path in files for line in own_words(path.read_text())]
    assert not wrong, wrong


def models(base: type[BaseModel]) -> list[type[BaseModel]]:
    return [base, *(one for below in base.__subclasses__() for one in models(below))]


def test_every_pattern_of_a_model_has_words() -> None:
    ours = [one for one in models(BaseModel) if one.__module__.startswith(("rig.", "rigctl."))]
    assert HostData in ours
    schemas = json.dumps([one.model_json_schema() for one in ours])
    assert not {json.loads(one) for one in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', schemas)} - SHAPES.keys()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("kernel_store", "a b", "kernel_store: a directory, /PATH, or HOST:/PATH"),
        ("supervision", {"shared_memory": "4 GB"}, "supervision.shared_memory: a number of bytes, with k, m or g"),
        ("supervision", 3, "supervision: keys and values are expected (got 3)"),
        ("supervision", {"restart": 1}, "supervision.restart: there is no such key"),
        ("service_user", "k" * 300, "at most 31"),
        ("base_packages", ["Rsync"], "base_packages.0: the name of a Debian package"),
    ],
)
def test_host_data_is_refused_in_words(key: str, value: Any, says: str) -> None:
    with pytest.raises(CatalogError) as caught:
        host_plan(DATA | {key: value}, "debian-12", HostSettings())
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500 and not PYTHONISH.search(str(caught.value))


@settings(max_examples=40, deadline=None)
@given(key=st.sampled_from(sorted(HostData.model_fields)), value=JSON)
@example(key="catalogue_overlay", value="")
@example(key="catalogue_overlay", value=".")
@example(key="catalogue_overlay", value="\x00")
@example(key="catalogue_overlay", value="absent.yaml")
def test_any_host_data_is_refused_in_words(key: str, value: Any) -> None:
    try:
        host_plan(DATA | {key: value}, "debian-12", HostSettings())
    except CatalogError as error:
        assert key in str(error) and not PYTHONISH.search(str(error))


@settings(max_examples=40, deadline=None)
@given(source=JSON)
def test_any_source_is_refused_in_words(source: Any) -> None:
    with pytest.raises(ContractError) as caught:
        CheckpointJob.parse({"format": 1, "name": "x", "destination": "/x", "source": source}, "here")
    assert "here: source" in str(caught.value) and not PYTHONISH.search(str(caught.value))


def test_a_kind_that_is_none_names_those_there_are() -> None:
    with pytest.raises(ContractError, match="'kind' is 'hubb', not one of 'hub', 'http'"):
        CheckpointJob.parse({"format": 1, "name": "x", "destination": "/x", "source": {"kind": "hubb"}}, "here")


@pytest.mark.parametrize(
    "text", ["", "[", "[]", '{"kind": "result"}', '{"kind": "guess"}', '{"kind": "reference", "id": "A b"}']
)
def test_a_ledger_of_anything_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ledger.LedgerError, match=r"x\.json: ") as caught:
        ledger.read(tmp_path)
    assert not PYTHONISH.search(str(caught.value))


def test_a_record_of_evidence_is_refused_in_words() -> None:
    with pytest.raises(CatalogError, match="reports: Input should be a valid list") as caught:
        parse("reviewed: 2026-01-01\nreports: 3")
    assert not PYTHONISH.search(str(caught.value))


def test_a_long_name_of_a_sweep_is_told_how_long_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "benchmark.yaml").write_text(f"{'s' * 300}: {{}}")
    with pytest.raises(CatalogError, match="at most 200 lower-case letters") as caught:
        load_sweeps(tmp_path)
    assert len(str(caught.value)) < 400


def test_git_that_fails_is_put_into_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 128, "", "hint: x\nfatal: No space left on device\n")
    monkeypatch.setattr("rigctl.kernel.source._try_git", lambda *_: failed)
    with pytest.raises(RigctlError) as caught:
        checkout(GitSource(kind="git", url="/x", commit="0" * 40), tmp_path / "tree")
    assert "could not be made: fatal: No space left on device; mend the cause" in str(caught.value)
    assert "--quiet" not in str(caught.value)


@pytest.mark.parametrize("key", ["_use_sudo_login", "_su_user", "_ignore_errors", "_run_once", "_shell_executable"])
def test_what_changes_how_every_command_runs_is_refused_by_name(key: str) -> None:
    """A login shell of sudo's joins the lines of a script (pyinfra-dev/pyinfra#1699); others skip hosts or failures."""
    with pytest.raises(CatalogError, match=rf"host data: {key}: every verb reaches root by login or by `_sudo: True`"):
        host_plan(DATA | {"_sudo": True, key: True}, "debian-12", HostSettings())
    assert host_plan(DATA | {"_sudo": True, "_parallel": 2, "_env": {"A": "b"}}, "debian-12", HostSettings()).serving


def test_a_sudo_that_speaks_another_language_is_understood(tmp_path: Path) -> None:
    """pyinfra waits for an English question (pyinfra-dev/pyinfra#1125, #1688); ours asks none and takes any answer."""
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: il est n\u00e9cessaire de saisir un mot de passe' >&2; exit 1\n")
    sudo.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    asked = ["sh", "-c", Privilege().command(sudo=True)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, env=environment)
    found = Privilege().process(done.stdout.splitlines())
    assert (found.root, found.trouble) == (False, "il est n\u00e9cessaire de saisir un mot de passe")
