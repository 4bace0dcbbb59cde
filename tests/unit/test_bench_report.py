"""The report as Markdown: it names what was planted, and reproduces February from the reference entries alone."""

from __future__ import annotations

from rig.bench import ledger, report
from tests.unit.bench_results import made_result


def lines(*results: ledger.Result) -> str:
    return report.markdown(results)


def test_planted_faults_are_named() -> None:
    text = lines(
        made_result("vllm-base", 64, [100, 101, 102]),
        made_result("vllm-eagle3-custom", 64, [200, 201, 202], length=2.4, limit=48),
        made_result("vllm-base", 1, [40, 60, 61, 62]),
        made_result("vllm-base", 8, [100, 130, 101, 131, 100, 130]),
        made_result("vllm-base", 128, [], status="failed", cause="the engine ended: out of memory"),
    )
    assert "- **unfair: max_running_requests.** limits of running requests differ (vllm-base: 256" in text
    assert "the only load measured for more than one: no recommendation, the comparison is unfair" in text
    assert "- **warning: cold.** vllm-base at 1: the first round was cold: 40.0 tok/s" in text
    assert "- **warning: bimodal.** vllm-base at 8: the rounds fall into two groups, 3 around 100.0 and 3" in text
    assert "| vllm-base | 128 | 0 | the engine ended: out of memory |" in text


def test_tables_are_whole() -> None:
    text = lines(made_result("a", 1, [60.25, 61.5, 60.75]), made_result("b", 1, [120.25, 121.5], length=2.4))
    assert "| a | 1 | 60.8 | 60.2 to 61.5 | 60.8 | 3 |" in text
    assert "| b | 1 | 2.40 | 46.7 % | 47 % 47 % 47 % |" in " ".join(text.split())
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_what_an_engine_does_not_count_is_told() -> None:
    text = lines(made_result("s", 1, [60, 61], length=2.4, engine="sglang"))
    assert "| s | 1 | 2.40 | 46.7 % | not counted |" in text


def test_diagnosis_is_in_the_report() -> None:
    low = made_result("vllm-eagle3-custom", 1, [40, 40.1, 40.2], length=1.1)
    text = lines(made_result("vllm-base", 1, [60, 60.1, 60.2]), low)
    assert "drafter below break-even: acceptance length 1.10, it needs 1.65 at concurrency 1." in text
    assert "- **wrong features: likely.** only 3% are accepted at position 0" in text
    assert "Decides: the sweep `layer-ids`" in text


def test_february_from_the_reference_entries_alone() -> None:
    text = report.markdown(ledger.references(ledger.read()))
    table = text[text.index("Reported by the operator") : text.index("Reported by the RTX PRO 6000")]
    assert "| vllm-base | vllm 0.16.0 | unknown tok/s single stream; 1,536 tok/s peak |" in table
    assert "0.66 (as reported) | length 1.75 (15.0% of the drafts) | 2.65 |" in table
    assert "| sglang-base | sglang 0.5.9 | 63.6 tok/s single stream; 2,370 tok/s peak |" in table
    assert "length 1.68 (22.7% of the drafts); length 2.26 (42.0% of the drafts) | 1.70 or 2.28 |" in table
    assert "The peak of 849 against 2,370 tok/s compares limits, not drafters: at most 48 requests ran" in table
    assert "- **unfair: max_running_requests.** limits of running requests differ (sglang-base" in table
