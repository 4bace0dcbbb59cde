"""Is a comparison fair, and is a difference real? Pure: results in, findings in words out."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from rig.bench.ledger import Reference, Result, ServedAs

Severity = Literal["unfair", "warning", "note"]

# A limit is taken as reached when this share of it was running while others waited.
BINDING_SHARE = 0.98
# A first round this much slower than the slowest of the later ones may be cold; two groups of rounds further apart than
# this share of the median, and than three times the spread inside them, are two modes.
COLD_SHARE = 0.10
MODES_SHARE = 0.05
MODES_SPREADS = 3.0


@dataclass(frozen=True)
class Finding:
    """What is wrong with a result or a comparison. unfair: the numbers must not be compared as they are."""

    severity: Severity
    check: str
    message: str

    def of(self, where: str) -> "Finding":
        """The same, said of `where`."""
        return replace(self, message=f"{where}: {self.message}")


def compare_conditions(results: Sequence[Result]) -> list[Finding]:
    """What differs between results that are to be compared at the same concurrency and context."""
    findings: list[Finding] = []
    for check, words, read in _CONDITIONS:
        values = {result.configuration.name: read(result) for result in results}
        if len(set(map(repr, values.values()))) > 1:
            listed = ", ".join(f"{name}: {_shown(value)}" for name, value in values.items())
            findings.append(Finding("unfair", check, f"{words} differ ({listed})"))
    return findings


_CONDITIONS: tuple[tuple[str, str, Callable[[Result], Any]], ...] = (
    ("max_running_requests", "limits of running requests", lambda r: r.configuration.effective_limit),
    ("context_length", "context lengths", lambda r: r.configuration.context_length),
    ("target", "models", lambda r: r.configuration.target),
    ("prompts", "prompts", lambda r: (r.workload.prompts, r.workload.prompts_sha256[:12], r.workload.seed)),
    ("sampling", "sampling", lambda r: (r.workload.temperature, r.workload.top_p)),
    ("output", "answer lengths asked for", lambda r: (r.workload.output_tokens, r.workload.ignore_eos)),
    ("cache", "cache states", lambda r: r.workload.cache),
    ("requests", "numbers of requests a round", lambda r: r.workload.requests),
    ("generator", "load generators", lambda r: r.workload.generator),
    ("hardware", "machines", lambda r: r.hardware),
)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "not set" if value is None else str(value)


def limits_of_references(entries: Sequence[Reference]) -> list[Finding]:
    """Reported figures whose limit of running requests is known to differ."""
    served = [entry.configuration for entry in entries]
    if len({one.effective_limit for one in served}) < 2:
        return []
    listed = ", ".join(f"{one.name}: {_limit_words(one)}" for one in served)
    return [Finding("unfair", "max_running_requests", f"limits of running requests differ ({listed})")]


def _limit_words(served: ServedAs) -> str:
    if served.effective_limit is None:
        return "the engine's own"
    return f"{served.effective_limit}{'' if served.max_running_requests else ' (automatic)'}"


def check_result(result: Result) -> list[Finding]:
    """What is wrong with one result, whatever it is compared with."""
    checks = (_impossible, _binding, _cold, _bimodal, _idle, _tokens, _loss)
    return [finding for check in checks for finding in check(result)]


def _impossible(result: Result) -> Iterator[Finding]:
    """What an older version let into the ledger; today such a cell fails."""
    for number, measured in enumerate(result.rounds, 1):
        if wrong := measured.impossible():
            yield Finding("unfair", "records", f"round {number} cannot have been measured: {'; '.join(wrong)}")


def _binding(result: Result) -> Iterator[Finding]:
    limit = result.configuration.effective_limit
    automatic = result.configuration.max_running_requests is None
    own = " (SGLang's own limit with speculation; set max_running_requests)" if automatic else ""
    for number, measured in enumerate(result.rounds, 1):
        running, waiting = measured.observed.running_max, measured.observed.waiting_max
        if running is None or not waiting:
            continue
        if limit is not None and running >= BINDING_SHARE * limit and result.workload.concurrency > limit:
            yield Finding(
                "unfair" if automatic else "warning",
                "binding limit",
                f"round {number}: at most {limit} requests ran{own} "
                f"while up to {waiting:g} waited: the limit is measured, not the configuration",
            )
            return
        if running < BINDING_SHARE * min(limit or running, result.workload.concurrency):
            yield Finding(
                "warning",
                "queue",
                f"round {number}: {running:g} of {result.workload.concurrency} requests ran, up to {waiting:g} waited "
                "below the limit: the KV cache or the token budget is what binds",
            )
            return


def _cold(result: Result) -> Iterator[Finding]:
    speeds = [measured.output_tok_s for measured in result.rounds]
    if _first_is_cold(speeds):
        yield Finding(
            "warning",
            "cold",
            f"the first round was cold: {speeds[0]:.1f} tok/s, later ones {min(speeds[1:]):.1f} to "
            f"{max(speeds[1:]):.1f}; it is left out of the median",
        )
    if result.warmup_stable is False:
        yield Finding("warning", "cold", f"the warm-up was not stable after {result.warmup_rounds} rounds")


def _first_is_cold(speeds: Sequence[float]) -> bool:
    """Further below the slowest of the others than these lie apart, and by more than COLD_SHARE."""
    if len(speeds) < 2:
        return False
    slowest, fastest = min(speeds[1:]), max(speeds[1:])
    return speeds[0] < (1 - COLD_SHARE) * slowest and slowest - speeds[0] > fastest - slowest


def warm_speeds(result: Result, read: Callable[[Any], float] = lambda r: r.output_tok_s) -> list[float]:
    """The values of the rounds that count: a cold first round does not."""
    cold = _first_is_cold([measured.output_tok_s for measured in result.rounds])
    return [read(measured) for measured in result.rounds[1 if cold else 0 :]]


def _bimodal(result: Result) -> Iterator[Finding]:
    if modes := two_modes(warm_speeds(result)):
        slow, fast = modes
        yield Finding(
            "warning",
            "bimodal",
            f"the rounds fall into two groups, {len(slow)} around {median(slow):.1f} and {len(fast)} around "
            f"{median(fast):.1f} tok/s: something else changes between rounds",
        )


def two_modes(values: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """The two groups of a bimodal series, each of two or more; None when it is one group."""
    ordered = sorted(values)
    if len(ordered) < 4:
        return None
    gaps = [(high - low, index + 1) for index, (low, high) in enumerate(itertools.pairwise(ordered))]
    gap, split = max(gaps)
    slow, fast = ordered[:split], ordered[split:]
    inside = max(slow[-1] - slow[0], fast[-1] - fast[0])
    if min(len(slow), len(fast)) < 2 or gap < MODES_SHARE * median(ordered) or gap < MODES_SPREADS * inside:
        return None
    return slow, fast


def _idle(result: Result) -> Iterator[Finding]:
    drafts = [measured.counters.drafts for measured in result.rounds]
    if result.configuration.drafter is not None and drafts and all(count == 0 for count in drafts):
        yield Finding(
            "warning",
            "drafter",
            "the engine counted not one drafted token: speculation is not at work, or (n-gram) found nothing to copy",
        )


def _tokens(result: Result) -> Iterator[Finding]:
    for number, measured in enumerate(result.rounds, 1):
        counted = measured.counters.generated_tokens
        if counted is not None and counted != measured.output_tokens:
            yield Finding(
                "warning" if measured.errors else "unfair",
                "tokens",
                f"round {number}: the answers add up to {measured.output_tokens} tokens, the engine counted {counted}: "
                "somebody else used it, or answers were lost",
            )


def _loss(result: Result) -> Iterator[Finding]:
    if errors := sum(measured.errors for measured in result.rounds):
        words = "; ".join(sorted({text for measured in result.rounds for text in measured.error_summary}))
        yield Finding("unfair", "errors", f"{errors} requests failed ({words or 'no message'})")
    if preempted := sum(measured.counters.preemptions or 0 for measured in result.rounds):
        yield Finding(
            "note",
            "preemptions",
            f"{preempted} requests were preempted: the KV cache is too small for this load",
        )


@dataclass(frozen=True)
class Spread:
    """Median and range of the rounds that count."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    return Spread(median(values), min(values), max(values), len(values)) if values else None


def is_noise(one: Spread, other: Spread) -> bool:
    """Two ranges that overlap cannot be told apart; one round alone has no range, so it settles nothing."""
    return min(one.rounds, other.rounds) < 2 or (one.low <= other.high and other.low <= one.high)
