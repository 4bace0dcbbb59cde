"""Sweeps: the catalogue, what a host is asked to do, derived configurations, and the way back into the ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rig.artifacts.units import run_specification, unit_file
from rig.bench import ledger
from rig.bench.collect import served_as, to_result
from rig.bench.sweeps import SweepEntry, find_sweep, host_sweep, load_sweeps, prompt_texts, workloads_of
from rig.bench.variants import derive
from rig.catalog.yaml_source import CatalogError
from rig.host.settings import HostSettings
from rig.operations.benchmark import generator_environment
from rig.plan.host_plan import HostPlan, host_plan
from rigctl.contract.environment_build import EnvironmentBuild
from rigctl.contract.order import ContractError
from rigctl.contract.sweep import CellResult, HostFacts

DATA = {
    "ml_env": "/opt/env",
    "models": "/shared",
    "drafters": "/data/eagle3",
    "base_packages": [],
    "service_user": "kimi",
}


NOTHING = HostFacts(hardware="", driver=None, kernel="", receipt={}, models={})


@pytest.fixture(scope="module")
def plan() -> HostPlan:
    return host_plan(DATA, "debian-12", HostSettings())


def test_shipped_sweeps_are_sound_and_derive_everywhere(plan: HostPlan) -> None:
    drafting = [name for name, configuration in plan.serving.items() if configuration.speculation]
    for name, sweep in load_sweeps().items():
        derived = derive(plan, sweep, drafting)
        assert host_sweep(derived.plan, name, sweep, derived.names).order.pairs


def test_prompt_set_says_its_licence_and_repeats_nothing() -> None:
    texts = prompt_texts("mixed")
    assert len(texts) == len(set(texts)) == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {loads: []}", r"benchmark.yaml:1: a.loads: .*at least 1"),
        ("a:\n  loads: [{context: 0, concurrency: [0]}]", r"benchmark.yaml:2: a.loads.0.concurrency.0: .*greater"),
        (
            "a:\n  loads: [{context: 0, concurrency: [1]}]\n  round: 3",
            r"benchmark.yaml:3: a.round: there is no such key, did you mean \"rounds\"\?",
        ),
        ("a:\n  loads: [{context: 0, concurrency: [1]}]\n  prompts: gone", r"benchmark.yaml:3: a.prompts: there is no"),
    ],
)
def test_wrong_sweep_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "benchmark.yaml").write_text(text)
    with pytest.raises(CatalogError, match=message):
        load_sweeps(tmp_path)


def test_unknown_names_list_what_there_is(plan: HostPlan) -> None:
    with pytest.raises(CatalogError, match=r"no sweep nightly .*default"):
        find_sweep("nightly")
    with pytest.raises(CatalogError, match=r"no configuration vllm-bass \(it has: vllm-base"):
        derive(plan, find_sweep("default"), ["vllm-bass"])


def small(**changes: Any) -> SweepEntry:
    return SweepEntry.model_validate({"loads": [{"context": 0, "concurrency": [1, 4]}], **changes})


def test_requests_grow_with_the_streams() -> None:
    assert [workload.requests for workload in workloads_of(small())] == [8, 16]


def test_loads_that_do_not_fit_are_skipped_by_name(plan: HostPlan) -> None:
    sweep = small(loads=[{"context": 0, "concurrency": [1]}, {"context": 32500, "concurrency": [1]}])
    made = host_sweep(plan, "x", sweep, ["vllm-base"])
    assert made.skipped == ["vllm-base, mixed-t0-c32500-n1"]
    assert made.order.pairs == [("vllm-base", "mixed-t0-c0-n1")]


def test_sweep_id_covers_what_is_measured(plan: HostPlan) -> None:
    ids = {
        host_sweep(plan, "x", small(**change), ["vllm-base"]).order.id for change in ({}, {"seed": 1}, {"rounds": 5})
    }
    limited = replace(
        plan, serving={"vllm-base": plan.serving["vllm-base"].model_copy(update={"max_running_requests": 48})}
    )
    ids.add(host_sweep(limited, "x", small(), ["vllm-base"]).order.id)
    assert len(ids) == 4
    assert host_sweep(plan, "x", small(), ["vllm-base"]).order.id in ids


def test_variants_are_configurations_of_their_own(plan: HostPlan) -> None:
    derived = derive(plan, find_sweep("steps"), ["sglang-eagle3-custom"])
    assert derived.names == [f"sglang-eagle3-custom.steps-{n}" for n in (2, 3, 5)]
    text = unit_file(derived.plan, "sglang-eagle3-custom.steps-5")
    assert "--speculative-num-steps 5" in text
    assert "--speculative-num-draft-tokens 6" in text
    assert "Conflicts=kimi-sglang-eagle3-custom.service" in text


def test_layer_shift_serves_a_drafter_of_its_own(plan: HostPlan) -> None:
    derived = derive(plan, find_sweep("layer-ids"), ["vllm-eagle3-custom"])
    assert [drafter.shift for drafter in derived.drafters] == [0, 1, -1]
    later = derived.drafters[1]
    assert later.path == "/data/eagle3/.bench/custom-drafter.layers-later"
    assert later.path in unit_file(derived.plan, "vllm-eagle3-custom.layers-later")
    specification = run_specification(derived.plan, "vllm-eagle3-custom.layers-later")
    assert specification.drafter_path == later.path
    assert specification.checkpoints.drafter == "custom-drafter", "the checkpoint that was proved"
    training = specification.checkpoints.training
    assert training is not None and training.convention == "unknown"
    with pytest.raises(CatalogError, match="vllm-base has no drafter"):
        derive(plan, find_sweep("layer-ids"), ["vllm-base"])


def test_profiled_configuration_writes_below_its_cache(plan: HostPlan) -> None:
    derived = derive(plan, find_sweep("profile"), ["vllm-base", "sglang-base"])
    vllm = unit_file(derived.plan, "vllm-base.profiled")
    assert '\\"torch_profiler_dir\\": \\"/var/cache/kimi-rig/vllm-base.profiled/profile\\"' in vllm
    assert '\\"torch_profiler_with_stack\\": false' in vllm, "a trace with stacks is too large to read"
    sglang = unit_file(derived.plan, "sglang-base.profiled")
    assert "SGLANG_TORCH_PROFILER_DIR=/var/cache/kimi-rig/sglang-base.profiled/profile" in sglang


def test_ngram_counts_as_speculation(plan: HostPlan) -> None:
    derived = derive(plan, find_sweep("ngram-vllm"), ["vllm-base"])
    assert served_as(derived, "vllm-base.plain", "", NOTHING).drafter is None
    drafter = served_as(derived, "vllm-base.ngram-5", "", NOTHING).drafter
    assert drafter is not None
    assert (drafter.name, drafter.steps) == ("ngram", 5)


def test_wrong_variant_is_refused(plan: HostPlan) -> None:
    with pytest.raises(CatalogError, match="drafter lightseek-k25-drafter is not on this host"):
        derive(
            plan, small(variants={"x": {"speculation": {"drafter": "lightseek-k25-drafter"}}}), ["vllm-eagle3-custom"]
        )
    with pytest.raises(CatalogError, match="max_running_requests"):
        derive(plan, small(variants={"none": {"max_running_requests": 0}}), ["vllm-base"])


def test_methods_are_variants_of_one_configuration(plan: HostPlan) -> None:
    ngram = {"speculation": {"method": "ngram", "drafter": None, "steps": 5, "draft_tokens": 6}}
    changes = {
        "none": {"speculation": None},
        "ngram": ngram,
        "mtp": {"speculation": {"method": "mtp", "drafter": None}},
    }
    with pytest.raises(CatalogError, match=r"variant vllm-base\.mtp: kimi-k2\.5-int4 names no head of its own"):
        derive(plan, small(variants=changes), ["vllm-base"])
    del changes["mtp"]
    derived = derive(plan, small(variants=changes), ["vllm-eagle3-custom", "sglang-eagle3-custom"])
    found = {name: derived.plan.serving[name].speculation for name in derived.names}
    assert found["vllm-eagle3-custom.none"] is None
    facts = HostFacts(hardware="8x", driver=None, kernel="", receipt={}, models={})
    served = served_as(derived, "sglang-eagle3-custom.ngram", "d", facts)
    assert served.drafter == ledger.Drafter(name="ngram", method="ngram", steps=5, draft_tokens=6)
    assert '"method": "ngram"' in unit_file(derived.plan, "vllm-eagle3-custom.ngram").replace("\\", "")


def test_cell_becomes_a_ledger_entry(plan: HostPlan, tmp_path: Path) -> None:
    derived = derive(plan, small(), ["vllm-eagle3-aq-medai"])
    sweep = host_sweep(derived.plan, "x", small(), derived.names)
    cell = {
        "format": 1,
        "configuration": "vllm-eagle3-aq-medai",
        "workload": "mixed-t0-c0-n4",
        "digest": "abc",
        "at": "2026-11-29T12:00:00Z",
        "status": "failed",
        "cause": "the engine ended while it was measured",
        "generator": None,
        "rounds": [],
    }
    models = {"/data/eagle3/aq-medai-k2-drafter": {"layer_ids": [2, 30, 58]}, "/shared/kimi-k2.5-int4": {"layers": 61}}
    facts = {
        "format": 1,
        "hardware": "8x X",
        "driver": "580",
        "kernel": "6.1",
        "receipt": {"items": {}},
        "models": models,
    }
    known = HostFacts.parse(facts, "facts")
    result = to_result(CellResult.parse(cell, "cell"), sweep, derived, "kimi-1", known)
    ledger.append(result, tmp_path)
    assert ledger.read(tmp_path) == [result]
    assert result.id == "vllm-eagle3-aq-medai-mixed-t0-c0-n4-20261129t120000z"
    assert result.configuration.drafter is not None
    assert result.configuration.drafter.layer_ids == [2, 30, 58]
    assert result.configuration.drafter.targets == ["kimi-k2"]  # by its repository's name
    assert result.configuration.details["target_layers"] == 61
    assert result.receipt["driver"] == "580"
    with pytest.raises(ContractError, match=r"cell: status: .*'perhaps'"):
        CellResult.parse({**cell, "status": "perhaps"}, "cell")
    with pytest.raises(ledger.LedgerError, match="n9: not a result of sweep x-"):
        to_result(CellResult.parse({**cell, "workload": "n9"}, "cell"), sweep, derived, "kimi-1", known)


def test_the_generators_environment_can_be_built() -> None:
    described = generator_environment("/opt/x/aiperf/1", "3.11", "/etc/x/aiperf.txt", "/opt/x/.cache", "/opt/wheels")
    order = EnvironmentBuild.parse_text(described.text(), "ORDER")
    assert (order.path, order.patches) == (Path("/opt/x/aiperf/1"), None)
    assert order.wheels == Path("/opt/wheels"), "a host without an index would ask one"


@pytest.mark.parametrize("name", ["a b", "../x", "x;y", "X"])
def test_names_that_become_units_and_files(tmp_path: Path, name: str) -> None:
    load = "loads: [{context: 0, concurrency: [1]}]"
    (tmp_path / "benchmark.yaml").write_text(f'"{name}": {{{load}}}\n')
    with pytest.raises(CatalogError, match=r"benchmark\.yaml:1: .*lower-case letters"):
        load_sweeps(tmp_path)
    (tmp_path / "benchmark.yaml").write_text(f'whole: {{{load}, variants: {{"{name}": {{}}}}}}\n')
    with pytest.raises(CatalogError, match=r"benchmark\.yaml:1: whole\.variants"):
        load_sweeps(tmp_path)


@pytest.mark.parametrize("shift", [None, "1", 1.5, True])
def test_a_shift_is_a_whole_number(plan: HostPlan, shift: Any) -> None:
    with pytest.raises(CatalogError, match="layer_shift is a whole number"):
        derive(plan, small(variants={"x": {"layer_shift": shift}}), ["vllm-eagle3-custom"])
