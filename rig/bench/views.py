"""What the report shows, as tables and sentences without a format: the page and the Markdown are made from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rig.bench.acceptance_units import band, own_rate_definition
from rig.bench.analysis import (
    Drafted,
    Judged,
    Point,
    Scene,
    Study,
    drafted,
    judge_reference,
    recommend,
)
from rig.bench.diagnosis import Evidence, Hypothesis, diagnose
from rig.bench.fairness import Finding, compare_conditions, limits_of_references
from rig.bench.ledger import Reference, Result


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


@dataclass(frozen=True)
class SceneView:
    """One scene (prompts, temperature, context) of one host."""

    scene: Scene
    recommendation: Sequence[str]
    findings: Sequence[Finding]
    speed: Table
    latency: Table
    acceptance: Table | None
    break_even: Table | None
    load_time: Table | None
    diagnoses: Mapping[str, Sequence[Hypothesis]]


@dataclass(frozen=True)
class HostView:
    """Everything measured on one host."""

    study: Study
    scenes: Sequence[SceneView]
    failed: Table | None
    provenance: Table
    generators: str


@dataclass(frozen=True)
class ReferenceView:
    """What other people reported."""

    title: str
    findings: Sequence[Finding]
    table: Table
    explanations: Sequence[tuple[str, str]]
    judged: Sequence[Judged] = field(default=())


def host_view(study: Study) -> HostView:
    """The view of one host's newest results."""
    return HostView(
        study,
        [scene_view(study, scene) for scene in study.scenes],
        _failed(study),
        _provenance(study),
        ", ".join(sorted({result.workload.generator for result in study.results})),
    )


def scene_view(study: Study, scene: Scene) -> SceneView:
    """Tables, judgements and warnings of one scene."""
    points = [point for concurrency in study.concurrencies(scene) for point in study.at(scene, concurrency)]
    return SceneView(
        scene,
        recommend(study, scene),
        _findings(study, scene),
        _speed(points),
        _latency(points),
        _acceptance(points),
        _break_even(study, scene),
        _load_time(points),
        _diagnoses(study, scene),
    )


def _title(point: Point) -> tuple[Cell, Cell]:
    return point.result.configuration.name, _concurrency(point.result)


def _concurrency(result: Result) -> Number:
    return Number(result.workload.concurrency, 0, result.id, "workload.concurrency")


def _speed(points: Sequence[Point]) -> Table:
    head = ["configuration", "concurrent", "tok/s, all streams", "lowest to highest", "tok/s, one stream", "rounds"]
    head += [
        "answers",
        "output tokens",
        "engine counted",
        "errors",
        "most running",
        "most waiting",
        "KV use",
        "GPU W",
        "AllReduce %",
    ]
    return Table(head, [_speed_row(point) for point in points], "Throughput; medians of the rounds")


def _speed_row(point: Point) -> list[Cell]:
    rounds, name = point.result.rounds, point.result.id
    counted = [measured.counters.generated_tokens for measured in rounds]
    total = sum(value for value in counted if value is not None)
    watts = [sum(gpu.power_w for gpu in measured.observed.gpus) for measured in rounds if measured.observed.gpus]
    share = point.result.profile.get("all_reduce_share")
    low = Number(point.total.low, 1, name, "rounds.output_tok_s:min")
    high = Number(point.total.high, 1, name, "rounds.output_tok_s:max")
    return [
        *_title(point),
        Number(point.total.median, 1, name, "rounds.output_tok_s:median"),
        (low, " to ", high),
        Number(point.stream.median, 1, name, "rounds.stream_tok_s:median"),
        Number(point.total.rounds, 0, name, "rounds.output_tok_s:count"),
        Number(sum(measured.requests for measured in rounds), 0, name, "rounds.requests:sum"),
        Number(sum(measured.output_tokens for measured in rounds), 0, name, "rounds.output_tokens:sum"),
        Number(total, 0, name, "rounds.counters.generated_tokens:sum") if None not in counted else None,
        Number(sum(measured.errors for measured in rounds), 0, name, "rounds.errors:sum"),
        _most(point.result, "running_max"),
        _most(point.result, "waiting_max"),
        _most(point.result, "kv_use_max", 3),
        Number(max(watts), 0, name, "rounds.observed.gpus:power_w") if watts else None,
        Number(100 * share, 1, name, "profile.all_reduce_share") if share is not None else None,
    ]


def _most(result: Result, gauge: str, digits: int = 0) -> Number | None:
    seen = [value for measured in result.rounds if (value := getattr(measured.observed, gauge)) is not None]
    return Number(max(seen), digits, result.id, f"rounds.observed.{gauge}:max") if seen else None


def _latency(points: Sequence[Point]) -> Table:
    shown = [
        ("ttft", "p50"),
        ("ttft", "p90"),
        ("ttft", "p99"),
        ("itl", "p50"),
        ("itl", "p99"),
        ("e2e", "p50"),
        ("e2e", "p99"),
    ]
    names = {"ttft": "first token", "itl": "between tokens", "e2e": "whole answer"}
    head = ["configuration", "concurrent", *(f"{names[kind]} {quantile}" for kind, quantile in shown)]
    rows: list[list[Cell]] = [
        [
            *_title(point),
            *(
                Number(point.middle(kind, quantile), 1, point.result.id, f"rounds.{kind}_ms.{quantile}:median-all")
                for kind, quantile in shown
            ),
        ]
        for point in points
    ]
    return Table(head, rows, "Latency in milliseconds; medians of the rounds")


def _acceptance(points: Sequence[Point]) -> Table | None:
    rows = [_acceptance_row(point) for point in points if point.length is not None and point.rate is not None]
    head = [
        "configuration",
        "concurrent",
        "acceptance length",
        "accepted",
        "by position",
        "judgement",
        "engine's own rate",
    ]
    caption = (
        "Acceptance from the engine's counters: length = 1 + accepted drafts a step; accepted = share of the drafted"
    )
    return Table(head, rows, caption) if rows else None


def _acceptance_row(point: Point) -> list[Cell]:
    result = point.result
    length, rate = point.length or 0.0, point.rate or 0.0
    source = "rounds.observed.own_length_mean" if point.gauged else "rounds.counters"
    own = next((m.counters.own_rate for m in reversed(result.rounds) if m.counters.own_rate is not None), None)
    meaning = own_rate_definition(result.configuration.engine, result.configuration.version or "0")
    return [
        *_title(point),
        (Number(length, 2, result.id, source + ":length"), " (gauge)" if point.gauged else ""),
        (Number(100 * rate, 1, result.id, source + ":rate"), " %"),
        _positions(point),
        band(rate),
        f"{100 * own:.1f} % = {meaning.words}" if own is not None else None,
    ]


def _positions(point: Point) -> Cell:
    if not point.positions:
        return "not counted"  # SGLang has no counter of it
    shares = [100 * share for share in point.positions]
    numbers = (Number(share, 0, point.result.id, f"rounds.counters.accepted_at:{n}") for n, share in enumerate(shares))
    return tuple(item for number in numbers for item in (" ", number, " %"))


def _break_even(study: Study, scene: Scene) -> Table | None:
    rows = [_break_even_row(study, scene, one) for name in study.names for one in drafted(study, scene, name)]
    head = [
        "configuration",
        "concurrent",
        "base",
        "times base",
        "acceptance length",
        "break-even length",
        "drafter pays",
    ]
    return Table(head, rows, "A speculative step costs as many base steps as its break-even length") if rows else None


def _break_even_row(study: Study, scene: Scene, one: Drafted) -> list[Cell]:
    own, base = (study.points[scene, one.concurrency, name].result for name in (one.name, one.base))
    return [
        one.name,
        _concurrency(own),
        one.base,
        Number(one.speedup, 2, own.id, f"speedup over {base.id}"),
        Number(one.length, 2, own.id, "rounds.counters:length"),
        Number(one.break_even, 2, own.id, f"break-even over {base.id}"),
        {True: "yes", False: "no", None: "within noise"}[one.pays],
    ]


def _load_time(points: Sequence[Point]) -> Table | None:
    seen = {point.result.configuration.name: point.result for point in points if point.result.load_times}
    head = ["configuration", "GB"]
    head += [f"{what}, {state}" for state in ("cold", "warm") for what in ("read, s", "accepted, s", "times the read")]
    caption = "From start to accepted, with files cold and warm in the page cache, beside a plain read of them"
    return Table(head, [_load_time_row(result) for result in seen.values()], caption) if seen else None


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


def _diagnoses(study: Study, scene: Scene) -> dict[str, Sequence[Hypothesis]]:
    found: dict[str, Sequence[Hypothesis]] = {}
    for name in study.names:
        line = study.line(scene, name)
        if line and (hypotheses := diagnose_point(study, scene, line[0][1])):
            found[name] = hypotheses
    return found


def diagnose_point(study: Study, scene: Scene, point: Point) -> list[Hypothesis]:
    """Why the drafter of this point does badly; empty when it does not, or has none."""
    drafter = point.result.configuration.drafter
    if drafter is None or point.length is None:
        return []
    name, concurrency = point.result.configuration.name, point.result.workload.concurrency
    judged = {one.concurrency: one for one in drafted(study, scene, name)}
    greedy = Scene(scene.prompts, 0.0, scene.context)
    cold = dict(study.line(greedy, name)).get(concurrency) if scene.temperature else None
    layers = point.result.configuration.details.get("target_layers")
    return diagnose(
        Evidence(
            length=point.length,
            positions=point.positions,
            temperature=scene.temperature,
            target=point.result.configuration.target,
            targets=drafter.targets,
            break_even=judged[concurrency].break_even if concurrency in judged else None,
            layer_ids=drafter.layer_ids,
            layers=layers if isinstance(layers, int) else None,
            greedy_length=cold.length if cold else None,
        )
    )


def _findings(study: Study, scene: Scene) -> list[Finding]:
    found: dict[tuple[str, str], Finding] = {}
    for concurrency in study.concurrencies(scene):
        points = study.at(scene, concurrency)
        for finding in compare_conditions([point.result for point in points]):
            found.setdefault((finding.check, finding.message), finding)
        for point in points:
            where = f"{point.result.configuration.name} at {concurrency}"
            for finding in point.findings:
                told = Finding(finding.severity, finding.check, f"{where}: {finding.message}")
                found.setdefault((where, finding.message), told)
    order = {"unfair": 0, "warning": 1, "note": 2}
    return sorted(found.values(), key=lambda finding: order[finding.severity])


def _failed(study: Study) -> Table | None:
    rows: list[list[Cell]] = [
        [
            result.configuration.name,
            _concurrency(result),
            Number(result.workload.context, 0, result.id, "workload.context"),
            result.cause or "",
        ]
        for result in study.failed
    ]
    return Table(["configuration", "concurrent", "context", "cause"], rows, "Cells that failed") if rows else None


def _provenance(study: Study) -> Table:
    latest = {result.configuration.name: result for result in study.results}
    rows: list[list[Cell]] = []
    for name in study.names:
        result = latest[name]
        served = result.configuration
        release = f"{served.engine} {served.version or ''}".strip()
        limit = str(served.effective_limit or "not set")
        digest = str(served.details.get("digest", ""))[:12]
        drafter = f"{served.drafter.name}, {served.drafter.steps} steps" if served.drafter else ""
        rows.append([name, release, drafter, limit, f"{served.context_length or ''}", digest, result.at, result.sweep])
    head = ["configuration", "engine", "drafter", "running requests", "context", "started as", "newest result", "sweep"]
    return Table(head, rows, "What was measured; each ledger entry holds the host's whole receipt")


def reference_views(entries: Sequence[Reference]) -> list[ReferenceView]:
    """One view a reporter: February's table first, then the published figures."""
    by_id = {entry.id: entry for entry in entries}
    groups: dict[str, list[Reference]] = {}
    for entry in entries:
        groups.setdefault(entry.reported_by, []).append(entry)
    views = [_reference_view(who, group, by_id) for who, group in groups.items()]
    return sorted(views, key=lambda view: "operator" not in view.title)


def _reference_view(who: str, group: Sequence[Reference], by_id: Mapping[str, Reference]) -> ReferenceView:
    judged = [judge_reference(entry, by_id) for entry in group]
    engines = sorted({entry.configuration.engine for entry in group})
    findings: list[Finding] = []
    if "operator" in who:
        for engine in engines:
            findings += limits_of_references([entry for entry in group if entry.configuration.engine == engine])
    rows = [row for one in judged for row in _reference_rows(one)]
    head = [
        "configuration",
        "engine",
        "figures",
        "times base",
        "acceptance, every reading",
        "break-even length",
        "source",
    ]
    explained = [(one.entry.configuration.name, note) for one in judged for note in one.notes]
    return ReferenceView(f"Reported by {who}, not measured by us", findings, Table(head, rows), explained, judged)


def _reference_rows(judged: Judged) -> Iterator[list[Cell]]:
    entry = judged.entry
    figures = tuple(item for index, _ in enumerate(entry.figures) for item in _figure(entry, index))
    readings = judged.readings
    yield [
        entry.configuration.name,
        f"{entry.configuration.engine} {entry.configuration.version or ''}".strip(),
        figures,
        f"{judged.speedup:.2f} ({judged.speedup_from})" if judged.speedup else None,
        "; ".join(f"length {one.length:.2f} ({one.rate:.1%} of the drafts)" for one in readings) or None,
        " or ".join(f"{one.cost:.2f}" for one in readings if one.cost) or None,
        f"{entry.source}, {entry.at}",
    ]


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
