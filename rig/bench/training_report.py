"""The report of a training: what each drafter of the ladder, and each known one, did with held-out prompts."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from rig.bench import plots
from rig.bench.report import renderer
from rig.bench.views import Cell, Table
from rigctl.contract.evaluation import Drafter, Evaluation, InEngine, break_even, by_domain, length, paired
from rigctl.whole_files import write_whole


def page(evaluation: Evaluation, now: datetime | None = None) -> str:
    """The HTML page. Raises PlottingMissing without matplotlib."""
    return _render("training_report.html.j2", evaluation, now)


def markdown(evaluation: Evaluation, now: datetime | None = None) -> str:
    """The same for a terminal or a pull request, without pictures."""
    return _render("training_report.md.j2", evaluation, now)


def write(evaluation: Evaluation, directory: Path) -> list[Path]:
    """Write training.html and training.md, each whole or not at all."""
    made = {directory / "training.html": page(evaluation), directory / "training.md": markdown(evaluation)}
    for path, text in made.items():
        write_whole(path, text)
    return list(made)


def _render(template: str, evaluation: Evaluation, now: datetime | None) -> str:
    html = template.endswith(".html.j2")
    return (
        renderer(html=html)
        .get_template(template)
        .render(
            title=f"Drafters for {evaluation.target}: {evaluation.name}",
            made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
            findings=evaluation.findings,
            tables=[lengths(evaluation), domains(evaluation), speeds(evaluation), between(evaluation)],
            pictures=_pictures(evaluation) if html else {},
        )
    )


def _pairs(evaluation: Evaluation) -> list[tuple[str, Drafter, str, InEngine]]:
    return [
        (name, drafter, engine, found)
        for name, drafter in evaluation.drafters.items()
        for engine, found in drafter.engines.items()
    ]


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    return Table(list(head), [list(row) for row in rows], caption)


def lengths(evaluation: Evaluation) -> Table:
    """Acceptance length offline and in each engine, with the share that is right at each position."""
    rows: list[list[Cell]] = []
    for name, drafter, engine, found in _pairs(evaluation):
        drafts = sum(one.drafts for one in found.asked)
        shares = ", ".join(f"{100 * count / drafts:.0f}" for count in found.positions) if drafts else ""
        same = sum(one.identical for one in found.asked)
        rows.append(
            [
                name,
                f"{drafter.rung:,}" if drafter.rung is not None else "",
                f"{drafter.offline_length:.2f}" if drafter.offline_length else "",
                engine,
                f"{found.length:.2f}",
                shares,
                f"{drafts:,}",
                f"{same} of {len(found.asked)}",
            ]
        )
    head = (
        "drafter",
        "conversations",
        "offline length",
        "engine",
        "length",
        "right by position, %",
        "drafts",
        "same text",
    )
    return _table("Acceptance length on held-out prompts", head, rows)


def domains(evaluation: Evaluation) -> Table:
    """Length by domain."""
    names = sorted({one.domain for _, _, _, found in _pairs(evaluation) for one in found.asked})
    rows: list[list[Cell]] = []
    for name, _, engine, found in _pairs(evaluation):
        known = by_domain(found.asked)
        rows.append([name, engine, *(f"{known[domain]:.2f}" if domain in known else "" for domain in names)])
    return _table("Acceptance length by domain", ("drafter", "engine", *names), rows)


def speeds(evaluation: Evaluation) -> Table:
    """Output tokens a second with and without the drafter, and the length at which both would be equal."""
    rows: list[list[Cell]] = []
    for name, _, engine, found in _pairs(evaluation):
        for speed in found.speeds:
            even = break_even(found, speed)
            gain = f"{speed.drafting / speed.base:.2f}" if speed.base else ""
            cells = (f"{speed.base:,.1f}", f"{speed.drafting:,.1f}", gain, f"{found.length:.2f}")
            rows.append([name, engine, f"{speed.streams}", *cells, f"{even:.2f}" if even is not None else ""])
    head = ("drafter", "engine", "streams", "base tok/s", "tok/s", "times the base", "length", "break-even length")
    return _table("What pays", head, rows)


def between(evaluation: Evaluation) -> Table:
    """The same drafter on the same prompts in two engines: difference of lengths and its standard error."""
    rows: list[list[Cell]] = []
    for name, drafter in evaluation.drafters.items():
        engines = list(drafter.engines.items())
        for place, (one, mine) in enumerate(engines):
            for other, theirs in engines[place + 1 :]:
                if gap := paired(mine.asked, theirs.asked):
                    rows.append([name, one, other, f"{gap[0]:+.3f}", f"{gap[1]:.3f}", f"{gap[2]}"])
    head = ("drafter", "engine", "other engine", "difference of length", "standard error", "prompts")
    return _table("Between engines", head, rows)


def _pictures(evaluation: Evaluation) -> dict[str, Markup]:
    """Length against conversations of the ladder: of all prompts, of each domain, and offline."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, drafter, engine, here in _pairs(evaluation):
        if drafter.rung is None or name not in evaluation.drafters:
            continue
        found.setdefault(engine, []).append((drafter.rung, length(here.asked)))
        for domain, value in by_domain(here.asked).items():
            found.setdefault(f"{engine}, {domain}", []).append((drafter.rung, value))
    for drafter in evaluation.drafters.values():
        if drafter.rung and drafter.offline_length:
            found.setdefault("offline", []).append((drafter.rung, drafter.offline_length))
    if not any(rung for line in found.values() for rung, _ in line):
        return {}
    drawn = plots.ladder({name: sorted(line) for name, line in found.items()})
    return {"Acceptance length against conversations": Markup(drawn)}  # noqa: S704  # matplotlib's own
