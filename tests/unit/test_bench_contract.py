"""Orders of the benchmark against what can go wrong with them: a fault is named, never a traceback, never accepted."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rig.bench.fairness import check_result
from rigctl.bench import counters, load, sweep
from rigctl.bench.counters import MetricsWrong, Reading, window
from rigctl.contract.order import ContractError, Order
from rigctl.contract.sweep import CellResult, HostFacts, Sweep, cell_file
from rigctl.supervisor.engine_client import Engine
from tests.unit.bench_results import made_result, made_round
from tests.unit.test_bench_host import CELL, SWEEP, WRITTEN, export, record, specification

FACTS: dict[str, Any] = json.loads((WRITTEN / "facts.json").read_text())
ORDERS: list[tuple[type[Order], dict[str, Any]]] = [(Sweep, SWEEP), (CellResult, CELL), (HostFacts, FACTS)]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
# Keys that a cell or a host's facts may lack, because not every engine and host has them.
OPTIONAL = {
    "cause",
    "warmup_stable",
    "profile",
    "load_times",
    "order",
    "warmup_rounds",
    "error_summary",
    "observed",
    "format",
}
OPTIONAL |= {"layers", "layer_ids", "drafts", "drafted", "accepted", "accepted_at", "own_rate", "prompt_tokens"}
OPTIONAL |= {"preemptions", "samples", "gpus", "driver", "kv_use_max", "own_length_mean", "load_times"}
OPTIONAL |= {f"{name}_{what}" for name in ("running", "waiting") for what in ("max", "mean")}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """A copy in which `change` was made at the last key of `path`."""
    made = copy.deepcopy(document)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return made


def put(value: Any) -> Callable[[Any, Any], None]:
    return lambda inner, key: inner.__setitem__(key, value)


def drop(inner: Any, key: Any) -> None:
    del inner[key]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_mutated_order_is_refused_or_still_an_order(data: st.DataObject) -> None:
    kind, document = data.draw(st.sampled_from(ORDERS))
    path = data.draw(st.sampled_from(list(places(document))))
    mutated = changed(document, path, data.draw(st.just(drop) | JSON.map(put)))
    try:
        order = kind.parse(mutated, "here")
    except ContractError as error:
        assert str(error).startswith("here: ")
    else:
        assert kind.parse(json.loads(order.text()), "again").text() == order.text()


@pytest.mark.parametrize(("kind", "document"), ORDERS)
def test_no_missing_or_unknown_key_and_no_wrong_type_is_accepted(kind: type[Order], document: dict[str, Any]) -> None:
    free = {"receipt", "prompts", "models", "cells", "profile", "load_times"}  # their keys are names
    for path in places(document):
        if path[0] in free or path[-1] in OPTIONAL or isinstance(path[-1], int):
            continue
        wrongs = [drop, put(object()), put("x" if not isinstance(pick(document, path), str) else 7)]
        wrongs.append(lambda inner, key: inner.__setitem__(f"{key}_", inner[key]))
        for change in wrongs:
            with pytest.raises(ContractError, match=r"^here: "):
                kind.parse(changed(document, path, change), "here")
    with pytest.raises(ContractError, match=r"here: format 2 is newer than this program reads \(up to 1\)"):
        kind.parse({**document, "format": 2}, "here")


def pick(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("value", [-1.7e12, math.nan, math.inf, -1])
def test_an_impossible_number_of_a_cell_is_refused_by_its_field(value: float) -> None:
    numbers = [path for path in places(CELL) if type(pick(CELL, path)) in (int, float) and path[0] == "rounds"]
    assert len(numbers) > 20
    for path in numbers:
        with pytest.raises(ContractError, match=str(path[-1])):
            CellResult.parse(changed(CELL, path, put(value)), "cell")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("rounds", 0, "output_tokens"), 0, "rounds.0.output_tokens is 0"),
        (("rounds", 0, "counters", "generated_tokens"), None, "counters.generated_tokens is missing"),
        (("rounds", 0, "counters", "accepted"), 301, r"more than was drafted \(301 of 300\)"),
        (("rounds",), [], "a measured cell has rounds"),
        (("cause",), "it died", "a failed one has a cause"),
        (("workload",), "../x", "workload: letters, digits"),
    ],
)
def test_a_cell_that_says_nothing_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        CellResult.parse(changed(CELL, path, put(value)), "cell")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cells", "a"), ["n1", "n9"], "n9 is listed in cells and is no workload"),
        (("workloads", 1, "id"), "n1", "n1 names two workloads"),
        (("prompts", "mixed"), [], "mixed has no prompts"),
        (("prompts",), {}, "mixed has no prompts"),
        (("cells",), {"../a": ["n1"]}, "cells"),
        (("warmup", "most"), 0, "warmup.most: Input should be greater"),
    ],
)
def test_a_sweep_that_contradicts_itself_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message) as caught:
        Sweep.parse(changed(SWEEP, path, put(value)), "sweep.json")
    assert len(str(caught.value)) < 300, "it prints the whole order"


def test_what_0_2_0_wrote_is_read_as_it_was_meant() -> None:
    for kind, document in ORDERS:
        assert kind.parse(document, "here").document() == document
    read = Sweep.parse(SWEEP, "sweep.json")
    assert (read.rounds, read.warmup.least, read.warmup.most, read.warmup.tolerance) == (2, 1, 1, 0.1)
    cell = CellResult.parse(CELL, "cell")
    assert (cell.generator, cell.rounds[0].counters.drafted) == ("aiperf 0.13.0", 300)


# --- aiperf's export -------------------------------------------------------------------------------------------------

GOOD = record(0, 100, 1100, 11)
IMPOSSIBLE = [
    (("metrics", "time_to_first_token", "value"), -1.7e12, "metrics.time_to_first_token.value"),
    (("metrics", "time_to_first_token", "value"), 1.7e12, "metrics.time_to_first_token.value"),
    (("metrics", "time_to_first_token", "value"), 1101, "its first token came after its last"),
    (("metrics", "request_latency", "value"), math.nan, "metrics.request_latency.value"),
    (("metrics", "request_latency", "value"), -5.0, "metrics.request_latency.value"),
    (("metrics", "request_latency", "value"), "1100", "metrics.request_latency.value"),
    (("metrics", "usage_completion_tokens", "value"), 0, "metrics.usage_completion_tokens.value"),
    (("metrics", "usage_completion_tokens", "value"), 2.5, "metrics.usage_completion_tokens.value"),
    (("metrics", "usage_completion_tokens", "value"), math.inf, "metrics.usage_completion_tokens.value"),
    (("metrics", "usage_prompt_tokens"), None, "metrics.usage_prompt_tokens.value: is missing"),
    (("metadata", "request_end_ns"), 0, "it ended before it began"),
    (("metadata", "request_start_ns"), -1, "metadata.request_start_ns"),
    (("metadata",), [], "metadata.request_start_ns: is missing"),
]


@pytest.mark.parametrize(("path", "value", "message"), IMPOSSIBLE)
def test_an_impossible_record_is_named(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    records = [GOOD, changed(GOOD, path, put(value)), GOOD]
    with pytest.raises(load.LoadFailed, match=f"record 2: .*{message}"):
        load.parse(export(tmp_path, *records), 3)


@pytest.mark.parametrize("name", ["usage_completion_tokens", "usage_prompt_tokens", "time_to_first_token"])
def test_a_record_without_a_value_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(load.LoadFailed, match=f"record 1: metrics.{name}.value: is missing"):
        load.parse(export(tmp_path, changed(GOOD, ("metrics", name), drop), GOOD), 2)


def test_a_lost_record_fails_the_round(tmp_path: Path) -> None:
    with pytest.raises(load.LoadFailed, match="aiperf recorded 2 of 3 requests"):
        load.parse(export(tmp_path, GOOD, GOOD), 3)


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_export_fails_or_is_possible(tmp_path: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(places(GOOD))))
    mutated = changed(GOOD, path, data.draw(st.just(drop) | JSON.map(put)))
    lines = [json.dumps(GOOD).encode(), json.dumps(mutated).encode()]
    cut = data.draw(st.just(0) | st.integers(1, len(lines[1])))
    directory = export(tmp_path)
    (directory / "profile_export.jsonl").write_bytes(b"\n".join([lines[0], lines[1][cut:]]))
    try:
        measured, _ = load.parse(directory, 2)
    except load.LoadFailed as error:
        assert "record" in str(error)
    else:
        counted = measured.counters.model_copy(update={"generated_tokens": measured.output_tokens})
        assert measured.model_copy(update={"counters": counted}).impossible() == []
        assert measured.requests + measured.errors == 2


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b"1" * 10_000)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_export_of_anything_is_no_traceback(tmp_path: Path, content: bytes) -> None:
    directory = export(tmp_path, GOOD)
    for name in ("profile_export.jsonl", "profile_export_aiperf.json"):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(content)
        with pytest.raises(load.LoadFailed):
            load.parse(directory, 1)
        (directory / name).write_bytes(whole)


# --- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_count_its_tokens_fails_the_cell() -> None:
    for engine in ("vllm", "sglang"):
        with pytest.raises(MetricsWrong, match=f"exports no {engine}:generation_tokens_total"):
            window(Reading(), Reading({"prompt_tokens": 3.0}), specification(engine), 1)


def test_a_stored_result_without_a_count_is_unfair() -> None:
    result = made_result("a", 1, [100, 100])
    for wrong in (
        made_round(100, counters={"generated_tokens": None}),
        made_round(100).model_copy(update={"seconds": math.nan}),
    ):
        found = check_result(result.model_copy(update={"rounds": [wrong, result.rounds[0]]}))
        assert [(finding.severity, finding.check) for finding in found] == [("unfair", "records")]


@pytest.mark.parametrize("text", ["vllm:generation_tokens_total NaN\n", "vllm:num_requests_running -3\n", "x{\n"])
def test_metrics_that_cannot_be_are_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "metrics_text", lambda self: text)
    with pytest.raises(MetricsWrong, match="/metrics cannot be right"):
        counters.read(Engine(specification("vllm")))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"usage": None},
        {"usage": {}},
        {"usage": {"completion_tokens": 0}},
        {"usage": {"completion_tokens": "9"}},
    ],
)
def test_an_answer_that_does_not_count_is_a_failure(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "completion", lambda *_, **__: answer)
    workload = Sweep.parse(SWEEP, "sweep").workloads[0]
    with pytest.raises(load.LoadFailed, match=r"an answer without its number of tokens \(completion_tokens is"):
        load.warm(Engine(specification("vllm")), workload, ["x"], 1)
    with pytest.raises(load.LoadFailed, match=r"an answer without its number of tokens \(prompt_tokens is None"):
        load.tokens_a_word(Engine(specification("vllm")), ["x"], 1)


# --- cells on the host -----------------------------------------------------------------------------------------------


def test_a_stored_cell_that_cannot_be_is_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    (tmp_path / "cells").mkdir()
    wrong = changed(CELL, ("rounds", 0, "ttft_ms", "p50"), put(-1.7e12))
    for (name, workload), cell in {("a", "n1"): CELL, ("a", "n4"): wrong, ("b", "n1"): CELL}.items():
        (tmp_path / cell_file(name, workload)).write_text(json.dumps({**cell, "workload": workload}))
    found = {(one.configuration, one.workload): one for one in sweep.results(tmp_path / "sweep.json")}
    assert {name: one.status for name, one in found.items()} == {
        ("a", "n1"): "measured",
        ("a", "n4"): "failed",
        ("b", "n1"): "failed",
    }
    assert "rounds.0.ttft_ms.p50 is -1700000000000.0" in (found["a", "n4"].cause or "")
    assert "is the result of a, n1" in (found["b", "n1"].cause or "")
