"""What the benchmark concludes: units of acceptance, fairness, noise, recommendation, diagnosis."""

from __future__ import annotations

from typing import get_args

import pytest

from rig.bench.acceptance_units import DEFINITIONS, Drafting, own_rate_definition, proper_rate, step_cost
from rig.bench.analysis import crossover, judge_reference, newest, recommend
from rig.bench.diagnosis import CAUSES, Evidence, diagnose, layer_candidates
from rig.bench.fairness import check_result, is_noise, spread, two_modes, warm_speeds
from rig.bench.ledger import DIRECTORY, Result, read, references
from rigctl.contract.speculation import Method
from rigctl.contract.sweep import Counters
from tests.unit.bench_results import made_result, made_round

FEBRUARY = {entry.id: entry for entry in references(read(DIRECTORY / "reference"))}


@pytest.mark.parametrize(
    ("definition", "rate", "drafting", "length"),
    [
        ("vllm", 0.15, Drafting(steps=5), 1.75),
        ("sglang-gauge-old", 0.42, Drafting(steps=3, draft_tokens=4), 1.68),
        ("sglang-request", 0.42, Drafting(steps=3, draft_tokens=4), 2.26),
        ("sglang-gauge-old", 0.25, Drafting(steps=3, draft_tokens=4), 1.0),  # a drafter that is never right
        ("sglang-gauge", 0.0, Drafting(steps=3, draft_tokens=4), 1.0),
    ],
)
def test_rates_become_one_length(definition: str, rate: float, drafting: Drafting, length: float) -> None:
    assert DEFINITIONS[definition].to_length(rate, drafting) == pytest.approx(length)


def test_definition_follows_the_release() -> None:
    assert own_rate_definition("sglang", "0.5.10.post1").key == "sglang-gauge-old"
    assert own_rate_definition("sglang", "0.5.11").key == "sglang-gauge"
    assert own_rate_definition("vllm", "0.16.0").key == "vllm"


def test_february_in_numbers() -> None:
    assert proper_rate(1.68, 3) == pytest.approx(0.227, abs=5e-4)
    vllm = judge_reference(FEBRUARY["2026-02-vllm-eagle3-custom"], FEBRUARY)
    assert [round(reading.cost or 0, 2) for reading in vllm.readings] == [2.65]
    sglang = judge_reference(FEBRUARY["2026-02-sglang-eagle3-aq-medai"], FEBRUARY)
    assert [round(reading.cost or 0, 2) for reading in sglang.readings] == [1.70, 2.28]
    assert any("849" in note and "at most 48 requests" in note for note in sglang.notes)
    single = FEBRUARY["2026-02-vllm-base"].figures[0]
    assert (single.what, single.value) == ("single_stream_tok_s", None)


def test_published_figures_have_sources() -> None:
    published = [entry for name, entry in FEBRUARY.items() if name.startswith("published-")]
    assert len(published) == 19
    assert all(entry.source.split()[1].endswith(".md") for entry in published)


def checks(result: Result) -> set[tuple[str, str]]:
    return {(finding.severity, finding.check) for finding in check_result(result)}


def test_equal_results_have_no_findings() -> None:
    assert check_result(made_result("a", 8, [100, 101, 102])) == []


def test_binding_automatic_limit_is_unfair() -> None:
    observed = {"running_max": 48, "waiting_max": 80}
    result = made_result("s", 128, [849, 850, 851], length=1.7, limit=None, engine="sglang", observed=observed)
    assert ("unfair", "binding limit") in checks(result)
    assert ("warning", "queue") in checks(made_result("s", 128, [9, 9, 9], observed=observed))


def test_cold_first_round_is_told_and_left_out() -> None:
    result = made_result("a", 1, [76, 110, 115, 123])
    assert checks(result) == {("warning", "cold")}
    assert warm_speeds(result) == [110, 115, 123]
    assert checks(made_result("a", 1, [158, 182, 264])) == set()  # the others lie further apart


def test_bimodal_rounds() -> None:
    assert ("warning", "bimodal") in checks(made_result("a", 1, [100, 130, 101, 131, 100, 130]))
    assert two_modes([100, 103, 106, 110]) is None
    assert two_modes([100, 100, 100, 130]) is None  # one outlier is no mode


def test_tokens_must_add_up() -> None:
    result = made_result("a", 1, [100, 100])
    wrong = result.model_copy(update={"rounds": [made_round(100, counters={"generated_tokens": 999})]})
    assert ("unfair", "tokens") in checks(wrong)


def test_a_drafter_that_drafts_nothing_is_told() -> None:
    result = made_result("a", 1, [100, 100], length=2.0)
    nothing = [made_round(100, counters={"drafts": 0, "drafted": 0, "accepted": 0}) for _ in range(2)]
    assert checks(result.model_copy(update={"rounds": nothing})) == {("warning", "drafter")}
    one = [nothing[0], result.rounds[0]]
    assert checks(result.model_copy(update={"rounds": one})) == set()
    assert checks(result.model_copy(update={"rounds": [made_round(100)]})) == set(), "an engine without counters"


def test_overlap_is_noise() -> None:
    def around(*values: float) -> object:
        return spread(values)

    assert is_noise(around(100, 102), around(101, 104))  # type: ignore[arg-type]
    assert not is_noise(around(100, 102), around(103, 104))  # type: ignore[arg-type]
    assert is_noise(around(100), around(200))  # type: ignore[arg-type]  # measured once


def study_words(*results: Result) -> str:
    study = newest(results)["kimi-1"]
    return " ".join(sentence for scene in study.scenes for sentence in recommend(study, scene))


def line(name: str, speeds: dict[int, float], length: float | None = None, **more: object) -> list[Result]:
    return [
        made_result(name, concurrency, [speed, speed * 1.001, speed * 1.002], length=length, **more)  # type: ignore[arg-type]
        for concurrency, speed in speeds.items()
    ]


BASE = {1: 60.0, 4: 200.0, 16: 600.0, 64: 1500.0}


def test_recommendation_follows_the_numbers() -> None:
    fast = line("eagle", {1: 120, 4: 300, 16: 500, 64: 1000}, length=2.4)
    words = study_words(*line("base", BASE), *fast)
    assert "Up to 4 concurrent requests: eagle." in words
    assert "From 16 concurrent requests: base." in words
    # ratios 1.5 at 4 and 0.833 at 16: ln 1.5 / ln 1.8 = 0.69 of the way from 4 to 16 on a logarithm
    assert "cross at about 10.4 concurrent requests" in words
    swapped = study_words(*line("base", {c: v * 3 for c, v in BASE.items()}), *fast)
    assert "At every measured load (1 to 64 concurrent requests): base." in swapped
    assert "eagle: drafter below break-even: acceptance length 2.40, it needs 3.60 at concurrency 1" in swapped


def test_noise_names_the_plain_configuration() -> None:
    words = study_words(*line("base", BASE), *line("eagle", {c: v * 1.001 for c, v in BASE.items()}, length=2))
    assert "base (within noise of eagle at some of these loads)" in words


def test_planted_unfairness_is_named_and_nothing_recommended() -> None:
    words = study_words(*line("base", BASE), *line("eagle", {c: v * 2 for c, v in BASE.items()}, length=2, limit=48))
    assert "no recommendation, the comparison is unfair" in words
    assert "limits of running requests differ (base: 256, eagle: 48)" in words
    assert ": eagle." not in words


def test_crossover_only_where_there_is_one() -> None:
    base = [(1, 10.0), (2, 20.0), (4, 40.0)]
    assert crossover(base, [(1, 20.0), (2, 20.0), (4, 20.0)]) == pytest.approx(2.0)
    assert crossover(base, [(1, 20.0), (2, 30.0), (4, 50.0)]) is None
    assert crossover(base, [(1, 5.0), (2, 30.0), (4, 50.0)]) is None


def evidence(**changes: object) -> Evidence:
    known: dict[str, object] = {
        "method": "eagle3",
        "length": 1.15,
        "positions": [0.10, 0.04, 0.01],
        "temperature": 0.0,
        "target": "kimi-k2.5-int4",
        "targets": ["kimi-k2.5-int4"],
        "layers": 61,
    }
    return Evidence(**{**known, **changes})  # type: ignore[arg-type]


def likely(found: Evidence) -> list[str]:
    return [hypothesis.cause for hypothesis in diagnose(found) if hypothesis.weight == "likely"]


def test_diagnosis_tells_causes_apart() -> None:
    assert likely(evidence()) == ["wrong features"]
    assert likely(evidence(targets=["kimi-k2"])) == ["wrong features", "wrong model"]
    quality = evidence(length=1.9, positions=[0.55, 0.25, 0.1], break_even=2.65)
    assert likely(quality) == ["quality"]
    hot = evidence(length=1.7, positions=[0.45, 0.2, 0.05], break_even=2.0, temperature=1.0, greedy_length=2.4)
    assert "temperature" in likely(hot)
    assert diagnose(evidence(length=2.4)) == []


def test_each_method_has_causes_of_its_own() -> None:
    lost = evidence(method="mtp", positions=[0.0, 0.0, 0.0], length=1.0)
    assert likely(lost) == ["lost head"]
    assert likely(evidence(method="mtp", positions=[0.6, 0.1], length=1.7, break_even=2.0)) == ["quality"]
    assert likely(evidence(method="ngram", positions=[])) == ["no repetition"]
    assert "wrong features" in likely(evidence(method="dflash"))
    for method in get_args(Method):
        assert {one.cause for one in diagnose(evidence(method=method))} == CAUSES[method].keys()


def test_layer_candidates_are_the_three_conventions() -> None:
    assert layer_candidates(None, 61) == [[2, 30, 58], [3, 31, 59], [1, 29, 57]]
    assert layer_candidates([0, 30, 61], 61) == [[0, 30, 61]]


def test_length_is_pooled_over_rounds() -> None:
    counters = Counters(drafts=4, accepted=12, accepted_at=[4, 4, 4])
    assert counters.length == 4.0
    assert counters.positions == [1.0, 1.0, 1.0]
    assert Counters(drafts=0, accepted=0).length is None
    assert step_cost(1.75, 0.66) == pytest.approx(2.65, abs=0.005)
