"""The run specification: what is written is what is read, and whatever else lies there is refused by field path."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.artifacts import units
from rig.artifacts.rollback_states import state_of
from rig.artifacts.units import run_specification, started_with, unit_file
from rig.catalog.entries import ROOT
from rigctl.contract.order import ContractError, Document
from rigctl.contract.run_specification import RunSpecification
from tests.unit.test_engines_and_units import box_plan, gpu_plan

FREE = {"module_options", "sysctls", "disk_scheduler", "notes", "quiet", "sampling"}
"""Objects whose keys are names: every key is a known one."""
DEEP = 5000

Path_ = tuple[str | int, ...]


def document(name: str = "sglang-eagle3-custom") -> Document:
    """A run specification as it lies on a host, with something in every part."""
    found: Document = json.loads(run_specification(gpu_plan(), name).text())
    found["host_settings"] |= {"kernel_arguments": ["iommu=pt"], "sysctls": {"vm.swappiness": "10"}}
    return found


def parts(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every value of a document, with its path."""
    yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from parts(child, (*path, key))


def changed(whole: Any, path: Path_, value: Any) -> Any:
    """A copy with another value at a path; at (): that value."""
    if not path:
        return value
    result = copy.copy(whole)
    result[path[0]] = changed(result[path[0]], path[1:], value)
    return result


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


WHOLE = document()
CLOSED = [(path, value) for path, value in parts(WHOLE) if not FREE & set(path)]
"""Every value but those whose keys are free."""


def dotted(*path: str | int) -> str:
    return ".".join(map(str, path))


def refusal(content: Any) -> str:
    with pytest.raises(ContractError) as refused:
        RunSpecification.parse(content, "/etc/x.json")
    return str(refused.value)


@pytest.mark.parametrize("name", ["sglang-base", "sglang-eagle3-custom", "vllm-base", "vllm-eagle3-custom"])
def test_what_is_written_is_what_is_read(name: str) -> None:
    order = run_specification(gpu_plan(), name)
    assert RunSpecification.parse_text(order.text(), "test") == order
    assert order.document()["format"] == RunSpecification.FORMAT


def test_a_missing_key_is_refused_by_its_path() -> None:
    for place, part in CLOSED:
        for key in part if isinstance(part, dict) else ():
            without = changed(WHOLE, place, {name: value for name, value in part.items() if name != key})
            # Without a format it is one of format 0.
            missing = "no longer read" if key == "format" else f"/etc/x.json: {dotted(*place, key)}: is missing"
            assert missing in refusal(without)


@pytest.mark.parametrize("wrong", [[[["x"]]], {"x": {"y": []}}, nested(DEEP)], ids=["list", "object", "deep"])
def test_a_wrong_type_is_refused_by_its_path(wrong: Any) -> None:
    for path, _ in CLOSED:
        said = refusal(changed(WHOLE, path, wrong))
        assert said.startswith(f"/etc/x.json: {dotted(*path)}")
        assert len(said) < 20_000, "a fault is for people, not a copy of the file"


@pytest.mark.parametrize("host", ["kimi-1.example.com", "", "fe80::1%eth0", "10.0.0.256"])
def test_an_engine_listens_on_an_address(host: str) -> None:
    """A name was looked up after the load, and ended the unit; it is refused before anything starts."""
    found = document()
    found["endpoints"][0]["host"] = host
    with pytest.raises(ContractError, match=r"endpoints\.0\.host: a program listens on an IP address or localhost"):
        RunSpecification.parse(found, "here")
    found["endpoints"][0]["host"] = "localhost"
    RunSpecification.parse(found, "here")


def test_an_unknown_key_is_refused_by_its_path() -> None:
    for path, part in CLOSED:
        if isinstance(part, dict):
            said = refusal(changed(WHOLE, path, {**part, "modle": 1}))
            assert said == f'/etc/x.json: {dotted(*path, "modle")}: there is no such key, did you mean "model"?'


NUMBERS = st.integers(-(2**53), 2**53) | st.floats()
LEAVES = st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from(["eagle3", "\ud800", "a\nb"])
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_accepted_is_taken_as_it_is_written(data: st.DataObject) -> None:
    mutated: Any = copy.deepcopy(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        places = [*parts(mutated)]
        path, value = places[data.draw(st.integers(0, len(places) - 1))]
        if isinstance(value, dict) and data.draw(st.booleans()):
            keys = st.text(max_size=5) | st.sampled_from([*value, "host", "methods", "\ud800"])
            more = {**value, data.draw(keys): data.draw(JSON)}
            gone = data.draw(st.sampled_from([*more, ""]))
            mutated = changed(mutated, path, {key: one for key, one in more.items() if key != gone})
        else:
            mutated = changed(mutated, path, data.draw(JSON))
    try:
        order = RunSpecification.parse(mutated, "x")
    except ContractError as error:
        assert str(error).startswith("x: ")
        assert str(error).isprintable()
    else:
        assert order.document() == mutated


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "1", "null", '"x"', "[" * 200_000, "\ud800".encode("utf-8", "surrogatepass")]
)
def test_what_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(ContractError, match=r"^x: (not JSON|a JSON object is expected)"):
        RunSpecification.parse_text(text, "x")


def test_a_newer_format_says_what_to_do() -> None:
    newer = RunSpecification.FORMAT + 1
    with pytest.raises(ContractError, match=rf"format {newer} is newer than this program reads .*: deploy again"):
        RunSpecification.parse({**WHOLE, "format": newer}, "x")


def test_a_drafter_has_a_path_and_a_name() -> None:
    with pytest.raises(ContractError, match=r"drafter_path needs checkpoints\.drafter"):
        RunSpecification.parse(changed(WHOLE, ("checkpoints", "drafter"), None), "x")


def test_the_digest_says_whether_a_restart_would_change_what_runs() -> None:
    plan, name = gpu_plan(), "vllm-eagle3-custom"
    order, entry = run_specification(plan, name), plan.serving[name]

    def of(**update: Any) -> str:
        serving = {**plan.serving, name: entry.model_copy(update=update)}
        return run_specification(replace(plan, serving=serving), name).digest

    assert of() == order.digest
    assert of(description="other words") == order.digest
    assert run_specification(gpu_plan(configurations=[name]), name).digest == order.digest, "fewer beside it"
    others = [
        of(flags={"seed": 1}),
        of(environment={"A": "1"}),
        of(gpus=[0]),
        of(tool_call_parser=None),
        of(context_length=4096),
        of(speculation=entry.speculation and entry.speculation.model_copy(update={"break_even_length": 1.5})),
        run_specification(gpu_plan(supervision={"restarts": 9}), name).digest,
        run_specification(gpu_plan(api_key_file="~/key"), name).digest,
    ]
    assert len({order.digest, *others}) == len(others) + 1
    unit = unit_file(plan, name)
    assert started_with(order, f"# a comment\n{unit}", []) == started_with(order, unit, [])
    assert started_with(order, unit.replace("User=kimi", "User=other"), []) != started_with(order, unit, [])


def test_thresholds_at_their_defaults_are_the_same_named_or_not() -> None:
    said = gpu_plan().data.supervision.model_dump()
    assert run_specification(gpu_plan(supervision=said), "vllm-base").digest == (
        run_specification(gpu_plan(supervision={}), "vllm-base").digest
    )


def test_a_mirror_is_no_other_checkpoint() -> None:
    plan = gpu_plan()
    model = plan.checkpoints["kimi-k2.5-int4"]

    def of(**update: Any) -> str:
        source = model.source.model_copy(update=update)
        models = {**plan.checkpoints, "kimi-k2.5-int4": model.model_copy(update={"source": source})}
        return run_specification(replace(plan, checkpoints=models), "vllm-base").digest

    assert of(mirror="https://mirror.example.com") == of() != of(revision="0" * 40)


COUNTING = """
import collections, json, os
from jinja2 import Template
from pyinfra_cli.main import cli

rendered, render = collections.Counter(), Template.render

def counting(self, **values):
    rendered[values.get("name", self.name)] += 1
    return render(self, **values)

Template.render = counting
try:
    cli()
finally:
    with open(os.environ["RENDERED"], "w") as file:
        json.dump(rendered, file)
"""


def test_a_unit_is_rendered_once_in_a_plan_of_the_whole_deploy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTING, "--chdir", str(ROOT), "inventory/tour.py", "deploy.py", "--dry"]
    environment = {**os.environ, "RENDERED": str(tmp_path / "rendered")}
    subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    rendered = json.loads((tmp_path / "rendered").read_text())
    assert {"vllm-base", "sglang-base"} < rendered.keys()
    assert set(rendered.values()) == {1}


def test_the_order_that_cannot_be_written_is_refused_before_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = box_plan()
    monkeypatch.setattr(units, "served_model_name", lambda *_: 7)
    with pytest.raises(
        ContractError, match=r"serving\.vllm-base: model: a text is expected: .* needs quotes \(got 7\)"
    ):
        state_of(plan)


def test_a_file_that_is_not_there_is_no_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"a\.json cannot be read: No such file or directory$"):
        RunSpecification.read(tmp_path / "a.json")
