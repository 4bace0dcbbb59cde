"""Speculation by method: what the catalogue admits, the flags of each engine, and what each release knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rig.artifacts.units import pairs, run_specification
from rig.catalog.entries import ROOT, Speculation, load_catalog
from rig.catalog.speculation_flags import FLAGS
from rig.catalog.yaml_source import CatalogError
from rig.host.settings import settings_from_gpus
from rig.plan.command_lines import Locations, command_line
from rig.plan.host_plan import HostPlan, host_plan
from rigctl import engine_registry
from rigctl.contract.speculation import EXTRACTS, WITH_DRAFTER, Method
from rigctl.errors import RigctlError
from tests.support.plans import INVENTORY, catalog, data

RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "files/releases").glob("*.json"))}
MODELS = """
glm:
  role: target
  path: "{models}/glm"
  source: {kind: directory}
  heads: {mtp: {steps: 5}}
block-drafter:
  role: drafter
  method: dflash
  path: "{drafters}/block"
  targets: [kimi-k2.5-int4]
  source: {kind: directory}
"""
ENTRIES = """
glm-mtp:
  extends: vllm-base-current
  target: glm
  speculation: {method: mtp}
glm-mtp-sglang:
  extends: sglang-base-current
  target: glm
  speculation: {method: mtp, steps: 2}
block:
  extends: vllm-base-current
  speculation: {drafter: block-drafter, steps: 7}
copied:
  extends: vllm-base
  speculation: {method: ngram, steps: 5, options: {prompt_lookup_max: 4}}
copied-sglang:
  extends: sglang-base
  speculation: {method: ngram, steps: 5}
"""


@pytest.fixture
def methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Catalogues with a configuration of every method."""
    inventory = tmp_path / "inventory"
    shutil.copytree(INVENTORY, inventory)
    for name, more in (("checkpoints", MODELS), ("serving", ENTRIES)):
        path = inventory / f"{name}.yaml"
        path.write_text(path.read_text() + more)
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(inventory))
    return inventory


def planned() -> HostPlan:
    return host_plan(data("gpu"), "ubuntu-24.04", settings_from_gpus(8))


def drafting(plan: HostPlan, name: str) -> list[str]:
    """The words of a command line that are about speculation."""
    entry = plan.serving[name]
    argv = command_line(entry, plan.environments[entry.release].release, plan.locations(entry))
    found = [index for index, word in enumerate(argv) if word.startswith("--speculative")]
    return [word for index in found for word in argv[index : index + 2]]


def test_each_method_becomes_the_flags_of_its_engine(methods: Path) -> None:
    plan = planned()
    assert drafting(plan, "glm-mtp") == ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 5}']
    assert drafting(plan, "block") == [
        "--speculative-config",
        '{"method": "dflash", "model": "/data/eagle3/block", "num_speculative_tokens": 7}',
    ]
    copied = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    assert drafting(plan, "copied") == ["--speculative-config", copied]
    assert drafting(plan, "glm-mtp-sglang") == [
        *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
    ]
    assert drafting(plan, "copied-sglang") == [
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6")
    ]


def test_a_run_specification_names_the_method(methods: Path) -> None:
    plan = planned()
    found = {name: run_specification(plan, name) for name in ("glm-mtp", "block", "copied", "vllm-eagle3-custom")}
    assert {name: one.method for name, one in found.items()} == {
        "glm-mtp": "mtp",
        "block": "dflash",
        "copied": "ngram",
        "vllm-eagle3-custom": "eagle3",
    }
    assert found["glm-mtp"].drafter_path is None and found["glm-mtp"].steps == 5
    assert found["block"].checkpoints.drafter == "block-drafter"
    # What drafts without files has none that could fail to fit.
    assert {"glm-mtp", "block"} <= {one.name for one in pairs(plan).pairs}
    assert not {"copied", "vllm-base"} & {one.name for one in pairs(plan).pairs}


def test_the_drafters_entry_and_the_targets_head_fill_what_is_left_out(methods: Path) -> None:
    serving = load_catalog().serving
    assert serving["block"].speculation == Speculation(method="dflash", drafter="block-drafter", steps=7)
    assert serving["glm-mtp"].speculation == Speculation(method="mtp", steps=5)
    assert serving["glm-mtp-sglang"].speculation == Speculation(method="mtp", steps=2)


WRONG = [
    ("speculation: {method: mtp}", "speculation: {method: eagle3}", "glm-mtp.speculation: eagle3 needs a drafter"),
    (
        "speculation: {method: mtp}",
        "speculation: {method: mtp, drafter: custom-drafter}",
        "glm-mtp.speculation: mtp has no drafter: leave it out",
    ),
    ("  heads: {mtp: {steps: 5}}\n", "", "glm-mtp.speculation.method: checkpoints.glm names no head of its own"),
    (
        "method: ngram, steps: 5}",
        "method: ngramm}",
        "should be 'eagle3', 'dflash', 'mtp', 'ngram' or",
    ),
    (
        "{drafter: block-drafter, steps: 7}",
        "{method: eagle3, drafter: block-drafter}",
        "block.speculation.method: is eagle3, but block-drafter drafts by dflash",
    ),
    (
        "block:\n  extends: vllm-base-current",
        "block:\n  extends: vllm-base",
        "block.speculation.method: vllm-0.16.0 knows no dflash; it knows deepseek_mtp,",
    ),
    ("method: ngram, steps: 5}", "method: ngram, topk: 2}", "is for eagle3 and mtp: ngram drafts one chain"),
    ("  method: dflash\n", "  method: ngram\n", "block-drafter: ngram has no drafter; a drafter's method is one of"),
    ('  role: target\n  path: "{models}/glm"', '  role: target\n  method: eagle3\n  path: "{models}/glm"', "belong to"),
    (
        "  method: dflash\n",
        "  method: dflash\n  heads: {mtp: {}}\n",
        "block-drafter: heads, family, title and architecture belong to targets",
    ),
    ("steps: 5}}", "steps: 50}}", "checkpoints.glm.heads.mtp.steps: Input should be less than or equal to 16"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), WRONG, ids=[wrong for _, wrong, _ in WRONG])
def test_a_method_that_cannot_be_is_refused(methods: Path, right: str, wrong: str, message: str) -> None:
    texts = {path: path.read_text() for path in (methods / "serving.yaml", methods / "checkpoints.yaml")}
    assert sum(text.count(right) for text in texts.values()) >= 1
    for path, text in texts.items():
        path.write_text(text.replace(right, wrong, 1))
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, methods)
    assert message in str(caught.value)


@pytest.mark.parametrize(("release", "method"), [(name, method) for name in RECORDS for method in get_args(Method)])
def test_a_release_that_knows_a_method_has_its_flags(release: str, method: Method) -> None:
    entry = catalog().releases.get(release) or load_catalog(None, ROOT / "inventory").releases[release]
    if method == EXTRACTS and entry.engine == "sglang":
        assert (entry.engine, method) not in FLAGS
        return
    record, wanted = RECORDS[release], FLAGS[entry.engine, method]
    known = wanted.word in record["registry"]["methods"]
    assert (
        known
        or (method == "dflash" and release in ("vllm-0.16.0", "vllm-0.17.1", "sglang-0.5.9"))
        or (method == EXTRACTS and release == "vllm-0.16.0")
    )
    if known:
        configuration = (
            catalog()
            .serving["vllm-base"]
            .model_copy(
                update={
                    "speculation": Speculation(
                        method=method,
                        drafter="d" if method in WITH_DRAFTER else None,
                        layers=[1, 2] if method == EXTRACTS else None,
                    )
                }
            )
        )
        argv = command_line(configuration, entry, Locations("/python", "/target", "/drafter", "/staging"))
        assert ("/staging" in " ".join(argv)) == (method == EXTRACTS)
        assert {word for word in argv if word.startswith("--speculative")} <= record["options"].keys()
        assert ("/drafter" in " ".join(argv)) == (method in WITH_DRAFTER)


VLLM_REGISTRY = """
_TEXT: dict[str, tuple[str, str]] = {"AForCausalLM": ("a", "A"), "BForCausalLM": ("b", "B")}
_SPECULATIVE = {"Eagle3A": ("e", "E"), **_TEXT}
_GONE = {"OldForCausalLM": "0.9"}
_VLLM_MODELS = {**_TEXT, **_SPECULATIVE, **_ELSEWHERE, 3: ("c", "C")}
"""
VLLM_METHODS = """
Mtp = Literal["mtp", "x_mtp"]
Eagle = Literal["eagle3", Mtp]
SpeculativeMethod = Literal["ngram", Eagle, Unknown, Mtp]
"""


def environment(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "lib/python3.12/site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_an_installed_vllm_knows(tmp_path: Path) -> None:
    place = environment(
        tmp_path,
        {
            "vllm/model_executor/models/registry.py": VLLM_REGISTRY,
            "vllm/config/speculative.py": VLLM_METHODS,
            "vllm/tool_parsers/__init__.py": '_TOOL_PARSERS_TO_REGISTER = {"kimi_k2": ("f", "C")}\n',
            "vllm/reasoning/__init__.py": '_REASONING_PARSERS_TO_REGISTER = {"qwen3": ("f", "C")}\n',
        },
    )
    known = engine_registry.read(place, "vllm")
    assert known.architectures == {"AForCausalLM", "BForCausalLM", "Eagle3A"}
    assert known.methods == {"ngram", "eagle3", "mtp", "x_mtp"}
    assert known.tool_parsers == {"kimi_k2"} and known.reasoning_parsers == {"qwen3"}


def test_what_an_installed_sglang_knows(tmp_path: Path) -> None:
    members = "".join(f"    {name} = auto()\n" for name in ("EAGLE", "NGRAM", "NONE"))
    enum = f"class SpeculativeAlgorithm(Enum):\n{members}\n    def x(self):\n"
    parsers = 'class P:\n    {}: Dict[str, Type] = {{"glm45": A}}\n'
    place = environment(
        tmp_path,
        {
            "sglang/srt/models/a.py": "class A: ...\nEntryClass = [A, B]\n",
            "sglang/srt/models/deep/c.py": "EntryClass = C\n",
            "sglang/srt/models/d.py": "x = EntryClass\n",
            "sglang/srt/speculative/spec_info.py": enum,
            "sglang/srt/function_call/function_call_parser.py": parsers.format("ToolCallParserEnum"),
            "sglang/srt/parser/reasoning_parser.py": parsers.format("DetectorMap"),
        },
    )
    known = engine_registry.read(place, "sglang")
    assert known.architectures == {"A", "B", "C"}
    assert known.methods == {"EAGLE", "NEXTN", "NGRAM"}
    assert known.tool_parsers == known.reasoning_parsers == {"glm45"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_cannot_be_read_is_said(tmp_path: Path, engine: str) -> None:
    with pytest.raises(RigctlError, match="no architectures are found"):
        engine_registry.architectures(tmp_path, engine)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(), cut=st.integers(0, 300))
def test_a_damaged_registry_is_a_fault_and_no_traceback(tmp_path: Path, text: str, cut: int) -> None:
    whole = VLLM_REGISTRY + VLLM_METHODS
    place = environment(
        tmp_path, {"vllm/model_executor/models/registry.py": whole[:cut] + text.replace("\0", "") + whole[cut:]}
    )
    try:
        found = engine_registry.architectures(place, "vllm")
    except RigctlError as error:
        assert str(tmp_path) in str(error)
    else:
        assert all(isinstance(name, str) for name in found)
