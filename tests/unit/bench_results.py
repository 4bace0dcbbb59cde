"""Made-up results for tests: every number a test relies on is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rig.bench.ledger import Drafter, Result, ServedAs, Workload
from rigctl.contract.sweep import Counters, Distribution, Observed, Round

LATENCY = Distribution(mean=10, p50=10, p90=12, p99=15)


def made_round(
    tok_s: float, *, counters: dict[str, Any] | None = None, observed: dict[str, Any] | None = None
) -> Round:
    tokens = round(tok_s * 10)
    return Round(
        seconds=10,
        requests=8,
        errors=0,
        prompt_tokens=100,
        output_tokens=tokens,
        output_tok_s=tok_s,
        stream_tok_s=tok_s,
        ttft_ms=LATENCY,
        itl_ms=LATENCY,
        e2e_ms=LATENCY,
        counters=Counters(**{"generated_tokens": tokens, **(counters or {})}),
        observed=Observed(**(observed or {})),
    )


def made_result(
    name: str,
    concurrency: int,
    speeds: Sequence[float],
    *,
    length: float | None = None,
    limit: int | None = 256,
    engine: str = "vllm",
    context: int = 0,
    observed: dict[str, Any] | None = None,
    **changes: Any,
) -> Result:
    counters: dict[str, Any] = {}
    drafter = None
    if length is not None:
        drafter = Drafter(name="custom-drafter", steps=3, targets=["kimi-k2.5-int4"])
        accepted = round(1000 * (length - 1))
        counters = {"drafts": 1000, "drafted": 3000, "accepted": accepted}
        if engine == "vllm":  # SGLang does not count by position
            counters["accepted_at"] = [accepted - 2 * (accepted // 3), accepted // 3, accepted // 3]
    return Result(
        **{
            "id": f"{name}-{context}-{concurrency}",
            "at": "2026-11-29T12:00:00Z",
            "sweep": "test",
            "host": "kimi-1",
            "hardware": "8x RTX PRO 6000",
            "configuration": ServedAs(
                name=name,
                engine=engine,  # type: ignore[arg-type]
                version="0.33.0",
                drafter=drafter,
                max_running_requests=limit,
                context_length=32768,
            ),
            "workload": Workload(
                prompts="mixed",
                prompts_sha256="0" * 64,
                context=context,
                concurrency=concurrency,
                requests=8,
                output_tokens=512,
                ignore_eos=True,
                temperature=0,
                seed=1,
                cache="fresh",
                generator="aiperf 0.13.0",
            ),
            "status": "measured",
            "rounds": [made_round(speed, counters=counters, observed=observed) for speed in speeds],
            **changes,
        }
    )
