"""What the report shows, as tables and sentences without a format: the page and the Markdown are made from it. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar, get_args

from rig.bench.acceptance_units import band, own_rate_definition
from rig.bench.analysis import (
    Drafted,
    Judged,
    Point,
    Scene,
    Study,
    drafted,
    judge_reference,
)
from rig.bench.diagnosis import Evidence, Hypothesis, diagnose
from rig.bench.fairness import Finding, Severity, compare_conditions, limits_of_references
from rig.bench.ledger import Reference, Result, ServedAs
from rigctl.contract.speculation import Method


@dataclass(frozen=True)
class Number:
    """A number with the ledger entry and the key it comes from (no key: not one key alone)."""

    value: float
    digits: int
    entry: str
    path: str

    def __str__(self) -> str:
        return f"{self.value:,.{self.digits}f}"


Item = Number | str | None
Cell = Item | tuple[Item, ...]


@dataclass(frozen=True)
class Table:
    """head: column titles; the first column is a row's title."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], Cell]]
"""Title of a column -> what it shows of a row."""


def _table(columns: Columns[Row], rows: Iterable[Row], caption: str = "") -> Table:
    """A table without the columns that no row has anything in."""
    cells = [[show(row) for show in columns.values()] for row in rows]
    kept = [number for number, _ in enumerate(columns) if any(row[number] is not None for row in cells)]
    return Table([[*columns][one] for one in kept], [[row[one] for one in kept] for row in cells], caption)


def _concurrency(result: Result) -> Number:
    return Number(result.workload.concurrency, 0, result.id, "workload.concurrency")


def _number(point: Point, value: float | None, digits: int, path: str) -> Number | None:
    return None if value is None else Number(value, digits, point.result.id, path)


def _sum(path: str) -> Callable[[Point], Cell]:
    """The sum over the rounds; nothing where a round has no value."""

    def show(point: Point) -> Cell:
        values = [attrgetter(path)(measured) for measured in point.result.rounds]
        return _number(point, None if None in values else sum(values), 0, f"rounds.{path}:sum")

    return show


def _most(gauge: str, digits: int = 0) -> Callable[[Point], Cell]:
    """The highest of a gauge over the rounds that have it."""

    def show(point: Point) -> Cell:
        values = (getattr(measured.observed, gauge) for measured in point.result.rounds)
        highest = max((value for value in values if value is not None), default=None)
        return _number(point, highest, digits, f"rounds.observed.{gauge}:max")

    return show


def _watts(point: Point) -> Cell:
    cards = (measured.observed.gpus for measured in point.result.rounds)
    highest = max((sum(gpu.power_w for gpu in gpus) for gpus in cards if gpus), default=None)
    return _number(point, highest, 0, "rounds.observed.gpus:power_w")


def _all_reduce(point: Point) -> Cell:
    share = point.result.profile.get("all_reduce_share")
    return _number(point, None if share is None else 100 * share, 1, "profile.all_reduce_share")


_CELL: Columns[Point] = {
    "configuration": lambda point: point.result.configuration.name,
    "concurrent": lambda point: _concurrency(point.result),
}
_SPEED: Columns[Point] = {
    **_CELL,
    "tok/s, all streams": lambda point: _number(point, point.total.median, 1, "rounds.output_tok_s:median"),
    "lowest to highest": lambda point: (
        _number(point, point.total.low, 1, "rounds.output_tok_s:min"),
        " to ",
        _number(point, point.total.high, 1, "rounds.output_tok_s:max"),
    ),
    "tok/s, one stream": lambda point: _number(point, point.stream.median, 1, "rounds.stream_tok_s:median"),
    "rounds": lambda point: _number(point, point.total.rounds, 0, "rounds.output_tok_s:count"),
    "errors": _sum("errors"),
}
_COUNTED: Columns[Point] = {
    **_CELL,
    "answers": _sum("requests"),
    "output tokens": _sum("output_tokens"),
    "engine counted": _sum("counters.generated_tokens"),
    "most running": _most("running_max"),
    "most waiting": _most("waiting_max"),
    "KV use": _most("kv_use_max", 3),
    "GPU W": _watts,
    "AllReduce %": _all_reduce,
}


def _quantile(kind: str, quantile: str) -> Callable[[Point], Cell]:
    path = f"rounds.{kind}_ms.{quantile}:median-all"
    return lambda point: _number(point, point.middle(kind, quantile), 1, path)


_LATENCY: Columns[Point] = {
    **_CELL,
    **{
        f"{words} {quantile}": _quantile(kind, quantile)
        for kind, words, quantiles in (
            ("ttft", "first token", ("p50", "p90", "p99")),
            ("itl", "between tokens", ("p50", "p99")),
            ("e2e", "whole answer", ("p50", "p99")),
        )
        for quantile in quantiles
    },
}


def _source(point: Point) -> str:
    return "rounds.observed.own_length_mean" if point.gauged else "rounds.counters"


def _own_rate(point: Point) -> str | None:
    rates = (measured.counters.own_rate for measured in reversed(point.result.rounds))
    own = next((rate for rate in rates if rate is not None), None)
    served = point.result.configuration
    words = own_rate_definition(served.engine, served.version or "0").words
    return None if own is None else f"{100 * own:.1f} % = {words}"


def _positions(point: Point) -> Cell:
    if not point.counters.positions:
        return "not counted"  # SGLang has no counter of it
    shares = [100 * share for share in point.counters.positions]
    numbers = (Number(share, 0, point.result.id, f"rounds.counters.accepted_at:{n}") for n, share in enumerate(shares))
    return tuple(item for number in numbers for item in (" ", number, " %"))


_ACCEPTANCE: Columns[Point] = {
    **_CELL,
    "acceptance length": lambda point: (
        _number(point, point.length, 2, f"{_source(point)}:length"),
        " (gauge)" if point.gauged else "",
    ),
    "accepted": lambda point: (_number(point, 100 * (point.rate or 0.0), 1, f"{_source(point)}:rate"), " %"),
    "by position": _positions,
    "judgement": lambda point: band(point.rate or 0.0),
    "engine's own rate": _own_rate,
}
_BREAK_EVEN: Columns[Drafted] = {
    "configuration": lambda one: one.name,
    "concurrent": lambda one: _concurrency(one.own.result),
    "base": lambda one: one.against.result.configuration.name,
    "times base": lambda one: _number(one.own, one.speedup, 2, f"speedup over {one.against.result.id}"),
    "acceptance length": lambda one: _number(one.own, one.length, 2, "rounds.counters:length"),
    "break-even length": lambda one: _number(one.own, one.break_even, 2, f"break-even over {one.against.result.id}"),
    "drafter pays": lambda one: {True: "yes", False: "no", None: "within noise"}[one.pays],
}


def _load_time(points: Sequence[Point]) -> Table:
    seen = {point.result.configuration.name: point.result for point in points if point.result.load_times}
    head = ["configuration", "GB"]
    head += [f"{what}, {state}" for state in ("cold", "warm") for what in ("read, s", "accepted, s", "times the read")]
    caption = "From start to accepted, with files cold and warm in the page cache, beside a plain read of them"
    return Table(head, [_load_time_row(result) for result in seen.values()], caption)


def _load_time_row(result: Result) -> list[Cell]:
    found = result.load_times
    cells: list[Cell] = [result.configuration.name, Number(found["bytes"] / 1e9, 1, result.id, "load_times.bytes")]
    for state in ("cold", "warm"):
        keys = [f"read_{state}_seconds", f"accepted_{state}_seconds"]
        if not found.keys() >= {*keys}:
            cells += ["not in memory", None, None]
            continue
        cells += [Number(found[key], 1, result.id, f"load_times.{key}") for key in keys]
        cells.append(Number(found[keys[1]] / max(found[keys[0]], 1e-3), 2, result.id, ""))
    return cells


def scene_tables(study: Study, scene: Scene) -> list[Table]:
    """What was measured in one scene; tables of drafters only where there are any."""
    points = [point for concurrency in study.concurrencies(scene) for point in study.at(scene, concurrency)]
    drafting = [point for point in points if point.length is not None and point.rate is not None]
    beside = [one for name in study.names for one in drafted(study, scene, name)]
    tables = [
        _table(_SPEED, points, "Throughput: medians of the rounds"),
        _table(_LATENCY, points, "Latency in milliseconds: medians of the rounds"),
        _table(
            _COUNTED, points, "What was counted, by the load generator and by the engine itself; highest of the gauges"
        ),
        _table(
            _ACCEPTANCE,
            drafting,
            "Acceptance from the engine's counters: length = 1 + accepted drafts a step; "
            "accepted = share of the drafted",
        ),
        _load_time(points),
        _table(_BREAK_EVEN, beside, "A speculative step costs as many base steps as its break-even length"),
    ]
    return [table for table in tables if table.rows]


def diagnoses(study: Study, scene: Scene) -> dict[str, Sequence[Hypothesis]]:
    """Why drafters do badly, by configuration, at the lowest concurrency of each."""
    lines = {name: study.line(scene, name) for name in study.names}
    found = {name: diagnose_point(study, scene, line[0][1]) for name, line in lines.items() if line}
    return {name: hypotheses for name, hypotheses in found.items() if hypotheses}


def diagnose_point(study: Study, scene: Scene, point: Point) -> list[Hypothesis]:
    """Why the drafter of this point does badly; empty when it does not, or has none."""
    drafter = point.result.configuration.drafter
    if drafter is None or point.length is None:
        return []
    name, concurrency = point.result.configuration.name, point.result.workload.concurrency
    break_even = {one.concurrency: one.break_even for one in drafted(study, scene, name)}
    greedy = Scene(scene.prompts, 0.0, scene.context)
    cold = dict(study.line(greedy, name)).get(concurrency) if scene.temperature else None
    layers = point.result.configuration.details.get("target_layers")
    named = drafter.name if drafter.name in get_args(Method) else "eagle3"
    return diagnose(
        Evidence(
            method=drafter.method or named,
            length=point.length,
            positions=point.counters.positions,
            temperature=scene.temperature,
            target=point.result.configuration.target,
            targets=drafter.targets,
            break_even=break_even.get(concurrency),
            layer_ids=drafter.layer_ids,
            layers=layers if isinstance(layers, int) else None,
            greedy_length=cold.length if cold else None,
        )
    )


def findings(study: Study, scene: Scene) -> list[Finding]:
    """What is wrong with the results of a scene, or with comparing them, each once, the worst first."""
    found: dict[tuple[str, str], Finding] = {}
    for concurrency in study.concurrencies(scene):
        points = study.at(scene, concurrency)
        for finding in compare_conditions([point.result for point in points]):
            found.setdefault((finding.check, finding.message), finding)
        for point in points:
            where = f"{point.result.configuration.name} at {concurrency}"
            found |= {(where, finding.message): finding.of(where) for finding in point.findings}
    return sorted(found.values(), key=lambda finding: get_args(Severity).index(finding.severity))


def grouped(found: Iterable[Finding]) -> dict[tuple[Severity, str], list[str]]:
    """Messages of findings by severity and check, in their order."""
    groups: dict[tuple[Severity, str], list[str]] = {}
    for finding in found:
        groups.setdefault((finding.severity, finding.check), []).append(finding.message)
    return groups


_FAILED: Columns[Result] = {
    "configuration": lambda result: result.configuration.name,
    "concurrent": _concurrency,
    "context": lambda result: Number(result.workload.context, 0, result.id, "workload.context"),
    "cause": lambda result: result.cause or "",
}


def failed(study: Study) -> Table:
    """The cells that failed, each with its cause."""
    return _table(_FAILED, study.failed, "Cells that failed")


def _release(served: ServedAs) -> str:
    return f"{served.engine} {served.version or ''}".strip()


def _drafter(result: Result) -> str:
    drafter = result.configuration.drafter
    return f"{drafter.name}, {drafter.steps} steps" if drafter else ""


_PROVENANCE: Columns[Result] = {
    "configuration": lambda result: result.configuration.name,
    "engine": lambda result: _release(result.configuration),
    "drafter": _drafter,
    "running requests": lambda result: str(result.configuration.effective_limit or "not set"),
    "context": lambda result: str(result.configuration.context_length or ""),
    "started as": lambda result: str(result.configuration.details.get("digest", ""))[:12],
    "newest result": lambda result: result.at,
    "sweep": lambda result: result.sweep,
}


def provenance(study: Study) -> Table:
    """What each configuration was when it was measured last."""
    latest = {result.configuration.name: result for result in study.results}
    caption = "What was measured; each ledger entry holds the host's whole receipt"
    return _table(_PROVENANCE, (latest[name] for name in study.names), caption)


def _figures(judged: Judged) -> Cell:
    entry = judged.entry
    return tuple(item for index, _ in enumerate(entry.figures) for item in _figure(entry, index))


_REPORTED: Columns[Judged] = {
    "configuration": lambda one: one.entry.configuration.name,
    "engine": lambda one: _release(one.entry.configuration),
    "figures": _figures,
    "times base": lambda one: f"{one.speedup:.2f} ({one.speedup_from})" if one.speedup else None,
    "acceptance, every reading": lambda one: (
        "; ".join(f"length {reading.length:.2f} ({reading.rate:.1%} of the drafts)" for reading in one.readings) or None
    ),
    "break-even length": lambda one: (
        " or ".join(f"{reading.cost:.2f}" for reading in one.readings if reading.cost) or None
    ),
    "source": lambda one: f"{one.entry.source}, {one.entry.at}",
}


@dataclass(frozen=True)
class ReferenceView:
    """What other people reported. explanations: configuration and what is to be said of its figures."""

    title: str
    findings: Sequence[Finding]
    table: Table
    explanations: Sequence[tuple[str, str]]
    entries: Sequence[Reference]


def reference_views(entries: Sequence[Reference]) -> list[ReferenceView]:
    """One view a reporter: February's table first, then the published figures."""
    by_id = {entry.id: entry for entry in entries}
    reporters = dict.fromkeys(entry.reported_by for entry in entries)
    return [
        _reference_view(who, [entry for entry in entries if entry.reported_by == who], by_id)
        for who in sorted(reporters, key=lambda who: "operator" not in who)
    ]


def _reference_view(who: str, group: Sequence[Reference], by_id: Mapping[str, Reference]) -> ReferenceView:
    judged = [judge_reference(entry, by_id) for entry in group]
    engines = sorted({entry.configuration.engine for entry in group}) if "operator" in who else []
    unfair = [
        finding
        for engine in engines
        for finding in limits_of_references([entry for entry in group if entry.configuration.engine == engine])
    ]
    explained = [(one.entry.configuration.name, note) for one in judged for note in one.notes]
    return ReferenceView(f"Reported by {who}, not measured by us", unfair, _table(_REPORTED, judged), explained, group)


_FIGURES = {
    "single_stream_tok_s": "tok/s single stream",
    "peak_tok_s": "tok/s peak",
    "output_tok_s": "tok/s",
    "ratio_to_base": "times base",
    "prefill_tok_s": "tok/s prefill",
    "kv_tokens": "tokens of KV cache",
}


def _figure(entry: Reference, index: int) -> Iterator[Item]:
    figure = entry.figures[index]
    if index:
        yield "; "
    values = [("value", figure.value)] if figure.low is None else [("low", figure.low), ("high", figure.high)]
    for position, (key, value) in enumerate(values):
        if position:
            yield " to "
        yield "unknown" if value is None else Number(value, _digits(value), entry.id, f"figures.{index}.{key}")
    at = [f"{figure.concurrency} concurrent"] if figure.concurrency else []
    at += [f"context {figure.context:,}"] if figure.context else []
    yield f" {_FIGURES[figure.what]}{' at ' + ', '.join(at) if at else ''}"


def _digits(value: float) -> int:
    return len(f"{value:g}".partition(".")[2]) if value < 1e5 else 0
