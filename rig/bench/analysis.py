"""From results to judgements: who wins where, where lines cross, what a drafter must reach. Pure."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from rig.bench.acceptance_units import proper_rate, step_cost
from rig.bench.fairness import (
    Finding,
    Spread,
    check_result,
    compare_conditions,
    is_noise,
    spread,
    warm_speeds,
)
from rig.bench.ledger import Acceptance, Drafter, Reference, Result
from rigctl.contract.sweep import Counters

RULE = (
    "At each load the configuration with the highest median of total output tokens a second wins. Configurations whose "
    "range of rounds overlaps the winner's differ from it by noise only, and among these the one without a drafter is "
    "named. Nothing is named where the comparison is unfair. A drafter pays at a load where its acceptance length is "
    "above the cost of its step, measured in steps of the base configuration at that same load."
)


@dataclass(frozen=True, order=True)
class Scene:
    """A load without its concurrency: one plot. Results are compared within a scene, at one concurrency."""

    prompts: str
    temperature: float
    context: int

    @property
    def title(self) -> str:
        length = f"context {self.context:,} tokens" if self.context else "short context"
        return f"{length}, prompts {self.prompts}, temperature {self.temperature:g}"


def scene_of(result: Result) -> Scene:
    return Scene(result.workload.prompts, result.workload.temperature, result.workload.context)


@dataclass(frozen=True)
class Point:
    """A result as it is plotted and compared."""

    result: Result
    total: Spread
    """Output tokens a second, all streams together."""
    stream: Spread
    """Tokens a second of one stream, after its first token."""
    findings: Sequence[Finding]

    @cached_property
    def counters(self) -> Counters:
        """Drafts over all rounds."""
        counted = [measured.counters for measured in self.result.rounds if measured.counters.drafts]
        return Counters(
            drafts=sum(one.drafts or 0 for one in counted),
            drafted=sum(one.drafted or 0 for one in counted),
            accepted=sum(one.accepted or 0 for one in counted),
            accepted_at=[sum(column) for column in zip(*(one.accepted_at for one in counted), strict=False)],
        )

    @cached_property
    def length(self) -> float | None:
        """Acceptance length over all rounds, from counters; else the mean of the engine's gauge (see gauged)."""
        gauges = [value for m in self.result.rounds if (value := m.observed.own_length_mean) is not None]
        return self.counters.length or (fmean(gauges) if gauges else None)

    @property
    def gauged(self) -> bool:
        """True when the acceptance length comes from a gauge, because the release exports no counters."""
        return self.length is not None and not self.counters.drafts

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        if self.counters.drafted:
            return (self.counters.accepted or 0) / self.counters.drafted
        drafter = self.result.configuration.drafter
        return proper_rate(self.length, drafter.steps) if self.length is not None and drafter else None

    def middle(self, kind: str, quantile: str) -> float:
        """Median over the rounds of a latency quantile in milliseconds; kind: ttft, itl, e2e."""
        values = (getattr(getattr(measured, f"{kind}_ms"), quantile) for measured in self.result.rounds)
        return float(median(values))


def point(result: Result) -> Point | None:
    """None for a failed cell."""
    total = spread(warm_speeds(result))
    stream = spread(warm_speeds(result, lambda measured: measured.stream_tok_s))
    if result.status != "measured" or total is None or stream is None:
        return None
    return Point(result, total, stream, check_result(result))


@dataclass(frozen=True)
class Study:
    """The newest result of every configuration and load on one host."""

    host: str
    results: Sequence[Result]

    @cached_property
    def points(self) -> Mapping[tuple[Scene, int, str], Point]:
        """By scene, concurrency and configuration."""
        found = {(scene_of(r), r.workload.concurrency, r.configuration.name): point(r) for r in self.results}
        return {key: one for key, one in found.items() if one is not None}

    @cached_property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.status == "failed"]

    @property
    def generators(self) -> str:
        """Load generators, in words."""
        return ", ".join(sorted({result.workload.generator for result in self.results}))

    @cached_property
    def names(self) -> list[str]:
        """Configurations, those without a drafter first."""
        drafting = {result.configuration.name: result.configuration.drafter is not None for result in self.results}
        return sorted(drafting, key=lambda name: (drafting[name], name))

    @cached_property
    def scenes(self) -> list[Scene]:
        return sorted({scene for scene, _, _ in self.points})

    def line(self, scene: Scene, name: str) -> list[tuple[int, Point]]:
        """Points of one configuration by concurrency."""
        return [(c, self.points[scene, c, name]) for c in self.concurrencies(scene) if (scene, c, name) in self.points]

    def at(self, scene: Scene, concurrency: int) -> list[Point]:
        keys = ((scene, concurrency, name) for name in self.names)
        return [self.points[key] for key in keys if key in self.points]

    def concurrencies(self, scene: Scene) -> list[int]:
        return sorted({concurrency for one, concurrency, _ in self.points if one == scene})


def newest(entries: Iterable[Result]) -> dict[str, Study]:
    """One study a host, of the newest result of each configuration and load."""
    kept = {
        (r.host, scene_of(r), r.workload.concurrency, r.configuration.name): r
        for r in sorted(entries, key=lambda r: (r.at, r.id))
    }
    hosts = sorted({result.host for result in kept.values()})
    return {host: Study(host, [r for r in kept.values() if r.host == host]) for host in hosts}


def unfair(points: Sequence[Point]) -> list[Finding]:
    """Why these points must not be compared."""
    own = [finding.of(p.result.configuration.name) for p in points for finding in p.findings]
    return [f for f in (*compare_conditions([p.result for p in points]), *own) if f.severity == "unfair"]


@dataclass(frozen=True)
class Choice:
    """What to use at one concurrency; name None where nothing may be said. tied: within noise of the winner."""

    concurrency: int
    name: str | None
    tied: Sequence[str] = ()
    why: Sequence[Finding] = ()


def choose(points: Sequence[Point], concurrency: int) -> Choice:
    """RULE at one load."""
    if reasons := unfair(points):
        return Choice(concurrency, None, why=reasons)
    best = max(points, key=lambda p: p.total.median)
    near = [p for p in points if p is best or is_noise(p.total, best.total)]
    plain = [p for p in near if p.result.configuration.drafter is None]
    named = max(plain or near, key=lambda p: p.total.median)
    tied = [p.result.configuration.name for p in near if p is not named]
    return Choice(concurrency, named.result.configuration.name, tied)


def choices(study: Study, scene: Scene) -> list[Choice]:
    """RULE at every concurrency at which at least two configurations were measured."""
    loads = ((concurrency, study.at(scene, concurrency)) for concurrency in study.concurrencies(scene))
    return [choose(points, concurrency) for concurrency, points in loads if len(points) > 1]


def crossover(base: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> float | None:
    """Concurrency at which `other` stops being faster, interpolated on the logarithm of the concurrency.

    None when it does not cross downwards exactly once.
    """
    both = sorted(set(dict(base)) & set(dict(other)))
    ratios = [(c, dict(other)[c] / dict(base)[c]) for c in both]
    crossings = [(one, two) for one, two in itertools.pairwise(ratios) if (one[1] >= 1) != (two[1] >= 1)]
    if len(crossings) != 1 or crossings[0][0][1] < 1:
        return None
    (low, above), (high, below) = crossings[0]
    share = math.log(above) / (math.log(above) - math.log(below))
    return float(low * (high / low) ** share)


@dataclass(frozen=True)
class Drafted:
    """A speculative configuration beside its base at one load."""

    concurrency: int
    name: str
    own: Point
    against: Point
    """The base at this load."""
    length: float

    @property
    def speedup(self) -> float:
        return self.own.total.median / self.against.total.median

    @property
    def break_even(self) -> float:
        """Cost of a speculative step in base steps: the acceptance length at which both are equally fast."""
        return step_cost(self.length, self.speedup)

    @property
    def pays(self) -> bool | None:
        """None within noise."""
        return None if is_noise(self.own.total, self.against.total) else self.length > self.break_even


def base_of(study: Study, result: Result) -> str | None:
    """The configuration without a drafter that a speculative one is held against: same engine, release and target."""
    mine = result.configuration
    same = [
        other.configuration
        for other in study.results
        if other.configuration.drafter is None
        and (other.configuration.engine, other.configuration.version) == (mine.engine, mine.version)
        and other.configuration.target == mine.target
    ]
    # Of several the one with the same limits: a sweep over limits measures more than one.
    likest = min(
        same,
        key=lambda c: (c.effective_limit != mine.effective_limit, c.context_length != mine.context_length, c.name),
        default=None,
    )
    return likest.name if likest else None


def drafted(study: Study, scene: Scene, name: str) -> list[Drafted]:
    """A drafter at every load at which its base was measured too, if the two can be compared."""
    beside = (
        (concurrency, own, study.points.get((scene, concurrency, base_of(study, own.result) or "")))
        for concurrency, own in study.line(scene, name)
    )
    return [
        Drafted(concurrency, name, own, against, own.length)
        for concurrency, own, against in beside
        if against is not None and own.length is not None and not unfair([against, own])
    ]


def recommend(study: Study, scene: Scene) -> list[str]:
    """The recommendation for one scene in words, by RULE."""
    made = choices(study, scene)
    if not made:
        return ["Fewer than two configurations were measured at any load: nothing to choose between."]
    return [*_who_wins(study, scene, made), *_drafters(study, scene)]


def _who_wins(study: Study, scene: Scene, made: Sequence[Choice]) -> list[str]:
    words: list[str] = []
    runs = [(name, list(group)) for name, group in itertools.groupby(made, key=lambda choice: choice.name)]
    for name, group in runs:
        span = _span(group, first=group[0] is made[0], last=group[-1] is made[-1], single=len(runs) == 1)
        if name is None:
            reasons = sorted({finding.message for choice in group for finding in choice.why})
            words.append(f"{span}: no recommendation, the comparison is unfair: {'; '.join(reasons)}.")
            continue
        tied = sorted({other for choice in group for other in choice.tied})
        where = " at some of these loads" if len(group) > 1 else ""
        beside = f" (within noise of {', '.join(tied)}{where})" if tied else ""
        words.append(f"{span}: {name}{beside}.")
    for name in study.names:
        if (at := crossing(study, scene, name)) is not None:
            words.append(f"{name} and its base cross at about {at:.1f} concurrent requests.")
    return words


def crossing(study: Study, scene: Scene, name: str) -> float | None:
    """Where a speculative configuration stops being faster than its base."""
    line = study.line(scene, name)
    if not line or line[0][1].result.configuration.drafter is None:
        return None
    base = base_of(study, line[0][1].result)
    if base is None or any(unfair(study.at(scene, c)) for c, _ in line):
        return None
    medians = [[(c, p.total.median) for c, p in study.line(scene, which)] for which in (base, name)]
    return crossover(*medians)


def _span(group: Sequence[Choice], *, first: bool, last: bool, single: bool) -> str:
    low, high = group[0].concurrency, group[-1].concurrency
    at_low, at_high = (f"{load} concurrent request{'s' if load > 1 else ''}" for load in (low, high))
    spans = (
        (single and low != high, f"At every measured load ({low} to {at_high})"),
        (single, f"At {at_low}, the only load measured for more than one"),
        (last, f"From {at_low}"),
        (low == high, f"At {at_low}"),
        (first, f"Up to {at_high}"),
        (True, f"At {low} to {at_high}"),
    )
    return next(words for holds, words in spans if holds)


def _drafters(study: Study, scene: Scene) -> list[str]:
    found = {name: drafted(study, scene, name) for name in study.names}
    return [f"{name}: drafter {_drafter_words(judged)}." for name, judged in found.items() if judged]


def _drafter_words(judged: Sequence[Drafted]) -> str:
    shown = f"acceptance length {judged[0].length:.2f}"
    if loads := ", ".join(str(one.concurrency) for one in judged if one.pays):
        return f"above break-even at concurrency {loads} ({shown})"
    if all(one.pays is None for one in judged):
        return f"at break-even within noise ({shown})"
    worst = max(judged, key=lambda one: one.break_even)
    needs = [f"{one.break_even:.2f} at concurrency {one.concurrency}" for one in (judged[0], worst)]
    return f"below break-even: {shown}, it needs {' and '.join(dict.fromkeys(needs))}"


@dataclass(frozen=True)
class Reading:
    """One reading of a reported acceptance. cost: break-even length, where a speedup was reported too."""

    length: float
    rate: float
    cost: float | None


@dataclass(frozen=True)
class Judged:
    """A reported configuration with what follows from its figures."""

    entry: Reference
    speedup: float | None
    speedup_from: str
    readings: Sequence[Reading]
    notes: Sequence[str]


def judge_reference(entry: Reference, entries: Mapping[str, Reference]) -> Judged:
    """What a reference entry says beyond its figures: lengths, break-even, and whether a limit speaks through it."""
    base, drafter = entries.get(entry.base or ""), entry.configuration.drafter
    speedup, words = _reported_speedup(entry, base)
    readings = [_reading(acceptance, drafter, speedup) for acceptance in entry.acceptance] if drafter else []
    notes = [text for text in (entry.note, _limit_note(entry, base, speedup)) if text]
    return Judged(entry, speedup, words, readings, notes)


def _reading(acceptance: Acceptance, drafter: Drafter, speedup: float | None) -> Reading:
    length = acceptance.length(drafter)
    return Reading(length, proper_rate(length, drafter.steps), step_cost(length, speedup) if speedup else None)


def _figures(what: str, entry: Reference, base: Reference | None) -> tuple[float, float] | None:
    """A figure of an entry and the same of its base, where both have it."""
    values = [found.value for one in (entry, base) if one and (found := one.figure(what)) and found.value]
    return (values[0], values[1]) if len(values) == 2 else None


def _reported_speedup(entry: Reference, base: Reference | None) -> tuple[float | None, str]:
    if (ratio := entry.figure("ratio_to_base")) is not None:
        return ratio.value, "as reported"
    single = _figures("single_stream_tok_s", entry, base)
    return (single[0] / single[1], "single stream") if single else (None, "")


def _limit_note(entry: Reference, base: Reference | None, speedup: float | None) -> str:
    """The explanation of a peak that a hidden limit held down."""
    peaks = _figures("peak_tok_s", entry, base)
    limit = entry.configuration.effective_limit
    if base is None or peaks is None or limit in (None, base.configuration.effective_limit) or peaks[0] >= peaks[1]:
        return ""
    automatic = (
        ""
        if entry.configuration.max_running_requests
        else (", which SGLang sets by itself with speculation when max_running_requests is unset")
    )
    alone = f" A single stream was {speedup:.2f} times its base, so the drafter does not explain it." if speedup else ""
    return (
        f"The peak of {peaks[0]:,g} against {peaks[1]:,g} tok/s compares limits, not drafters: at most {limit} "
        f"requests ran{automatic}, that is {peaks[0] / limit:.1f} tok/s a stream, while the base had no such limit."
        f"{alone} Measure both with the same max_running_requests."
    )
