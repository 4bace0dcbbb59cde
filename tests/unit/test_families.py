"""Model families: what an entry leaves to them, where each value came from, and how the supervisor goes by them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.artifacts.units import run_specification, unit_file
from rig.catalog import entries
from rig.catalog.entries import forget_catalogs, load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.host.settings import HostSettings, settings_from_gpus
from rig.plan.command_lines import command_line
from rig.plan.host_plan import HostPlan, host_plan, plan_from_facts
from rig.plan.model_defaults import defaults_json, defaults_text
from tests.support.plans import INVENTORY, data
from tests.unit.host_archetypes import TURIN_DIRECT
from tests.unit.test_previous_version import WRITTEN

FAMILIES = """
kimi-k2:
  parsers:
    vllm: {tool: kimi_k2, reasoning: kimi_k2}
    sglang: {tool: kimi_k2, reasoning: kimi_k2}
  memory_fraction: {vllm: host, sglang: host}
glm:
  parsers:
    vllm: {tool: glm47, reasoning: glm45}
    sglang: {tool: glm47}
  answer: {thinks: asked, tokens: 4096}
  quiet: {chat_template_kwargs: {enable_thinking: false}}
  sampling: {temperature: 0.7}
  memory_fraction: {vllm: 0.9}
  memory_reserve: {vllm: 5000000000}
"""
GLM = """
glm:
  role: target
  title: GLM-5.2
  family: glm
  path: "{models}/glm"
  source: {kind: directory}
"""
SERVED = """
glm:
  release: vllm-0.33.0
  target: glm
  gpus: [0, 1, 2, 3, 4, 5, 6, 7]
  tensor_parallel: 8
  max_running_requests: 8
glm-own:
  extends: glm
  tool_call_parser: glm45
  reasoning_parser: null
  memory_fraction: 0.8
  answer: {tokens: 64}
glm-below:
  extends: glm-own
glm-sglang:
  release: sglang-0.5.23
  target: glm
  gpus: [0, 1, 2, 3, 4, 5, 6, 7]
  tensor_parallel: 8
  max_running_requests: 8
"""


def copied(root: Path) -> Path:
    """The tests' catalogues, to be changed."""
    return Path(shutil.copytree(INVENTORY, root / "inventory"))


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests' catalogues, with two families and a model of the second."""
    place = copied(tmp_path)
    (place / "families.yaml").write_text(FAMILIES)
    for name, more in (("checkpoints", GLM), ("serving", SERVED)):
        path = place / f"{name}.yaml"
        path.write_text(path.read_text().replace("kimi-k2.5-int4:\n", "kimi-k2.5-int4:\n  family: kimi-k2\n", 1) + more)
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(place))
    return place


def planned(**more: Any) -> HostPlan:
    return plan_from_facts(data("gpu", **more), TURIN_DIRECT)


def flag(plan: HostPlan, name: str, word: str) -> str | None:
    entry = plan.serving[name]
    argv = command_line(entry, plan.environments[entry.release].release, plan.locations(entry))
    return argv[argv.index(word) + 1] if word in argv else None


def test_a_family_fills_what_an_entry_leaves_out(inventory: Path) -> None:
    plan = planned()
    assert [
        flag(plan, "glm", word) for word in ("--tool-call-parser", "--reasoning-parser", "--gpu-memory-utilization")
    ] == [
        "glm47",
        "glm45",
        "0.9",
    ]
    # Its figures are no other model's: what the family does not say is the engine's own.
    assert [flag(plan, "glm-sglang", word) for word in ("--tool-call-parser", "--mem-fraction-static")] == [
        "glm47",
        None,
    ]
    assert flag(plan, "glm-sglang", "--reasoning-parser") is None
    order = run_specification(plan, "glm")
    assert (order.family, order.answer.thinks, order.answer.tokens) == ("glm", "asked", 4096)
    assert order.quiet == {"chat_template_kwargs": {"enable_thinking": False}}
    assert order.sampling == {"temperature": 0.7}
    assert "\nDescription=GLM-5.2: glm\n" in unit_file(plan, "glm")


@pytest.mark.parametrize("name", ["glm-own", "glm-below"])
def test_an_entry_wins_also_where_it_removes(inventory: Path, name: str) -> None:
    plan = planned()
    assert flag(plan, name, "--tool-call-parser") == "glm45"
    assert flag(plan, name, "--reasoning-parser") is None
    assert flag(plan, name, "--gpu-memory-utilization") == "0.8"
    assert run_specification(plan, name).answer.model_dump() == {"thinks": "asked", "tokens": 64}


def test_the_hosts_policy_decides_for_the_family_of_its_figures_alone(inventory: Path) -> None:
    path = inventory / "serving.yaml"
    path.write_text(path.read_text().replace("  memory_fraction: 0.95\n", "", 1))
    assert flag(planned(), "vllm-base", "--gpu-memory-utilization") == "0.94"
    # An inventory of before there were families is served as it was.
    (inventory / "families.yaml").unlink()
    checkpoints = inventory / "checkpoints.yaml"
    checkpoints.write_text(checkpoints.read_text().replace("  family: kimi-k2\n", "").replace("  family: glm\n", ""))
    forget_catalogs()
    assert flag(planned(), "vllm-base", "--gpu-memory-utilization") == "0.94"
    assert flag(planned(), "glm", "--gpu-memory-utilization") == "0.94"


def test_each_default_is_named_with_its_source(inventory: Path) -> None:
    plan = planned()
    line = {text: number for number, text in enumerate((inventory / "families.yaml").read_text().splitlines(), 1)}
    found = defaults_json(plan)["glm"]
    parsers = f"inventory/families.yaml:{line['    vllm: {tool: glm47, reasoning: glm45}']}"
    assert found["tool_call_parser"] == {"value": "glm47", "source": parsers}
    assert found["answer.tokens"]["value"] == 4096
    assert "answer.tokens" not in defaults_json(plan)["glm-own"]
    text = defaults_text(plan)
    assert f"tool_call_parser = glm47 ({parsers})\n    glm" in text
    assert (
        "reasoning_parser = glm45" in text
        and "glm-own" not in text.partition("reasoning_parser = glm45")[2].split("\n")[1]
    )


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("checkpoints.yaml", "family: glm", "family: gml", 'glm.family: there is no family gml, did you mean "glm"?'),
        (
            "families.yaml",
            "tool: glm47, reasoning: glm45",
            "tool: glm46",
            "glm.tool_call_parser: vllm-0.33.0 has no tool parser",
        ),
        ("families.yaml", "thinks: asked", "thinks: rarely", "families.yaml:11: families.glm.answer.thinks: "),
        ("families.yaml", "vllm: 0.9}", "vllm: 9}", "families.glm.memory_fraction.vllm"),
        ("families.yaml", "temperature: 0.7", "temprature: 0.7", "families.glm.sampling.temprature"),
        (
            "families.yaml",
            "  parsers:",
            "  parser:",
            'families.kimi-k2.parser: there is no such key, did you mean "parsers"?',
        ),
        ("families.yaml", "    sglang: {tool: glm47}", "    tgi: {tool: glm47}", "families.glm.parsers.tgi"),
    ],
)
def test_a_wrong_family_is_named_by_file_and_line(
    inventory: Path, file: str, right: str, wrong: str, message: str
) -> None:
    path = inventory / file
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong, 1))
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, inventory)
    assert message in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["glm47", "host", "vllm", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["vllm", "sglang", "tool", "thinks", "tokens", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(entries.Family.model_fields)), value=JSON, whole=st.booleans())
def test_whatever_stands_in_a_family_is_taken_or_named(inventory: Path, key: str, value: Any, whole: bool) -> None:
    content = yaml.safe_load(FAMILIES)
    content["glm"] = value if whole else {**content["glm"], key: value}
    (inventory / "families.yaml").write_text(yaml.safe_dump(content))
    forget_catalogs()
    try:
        load_catalog(None, inventory)
    except CatalogError as error:
        assert "families" in str(error) or "glm" in str(error)


def test_units_of_the_previous_version_are_current_with_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the catalogues of 0.3.0, where entries say themselves what the model's family does: nothing is restarted."""
    place = tmp_path / "inventory"
    shutil.copytree(WRITTEN / "inventory", place)
    path = place / "checkpoints.yaml"
    path.write_text(path.read_text().replace("  family: kimi-k2\n", "", 1))
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(place))
    one = json.loads((WRITTEN / "plans.json").read_text())["tour"]
    without = host_plan(one["data"], one["distribution"], HostSettings(**one["settings"]))
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(WRITTEN / "inventory"))
    with_family = host_plan(one["data"], one["distribution"], HostSettings(**one["settings"]))
    for name in with_family.serving:
        assert run_specification(with_family, name).digest == run_specification(without, name).digest
        assert unit_file(with_family, name) == unit_file(without, name)


def test_a_bare_host_is_planned_with_a_family(inventory: Path) -> None:
    plan = host_plan(data("gpu"), "ubuntu-24.04", settings_from_gpus(8))
    assert flag(plan, "glm", "--gpu-memory-utilization") == "0.9"
