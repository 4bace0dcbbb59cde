"""The report: one HTML page that needs no network and no script, and the same as Markdown."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rig.bench import plots, views
from rig.bench.analysis import RULE, Scene, Study, newest, recommend
from rig.bench.ledger import LedgerError, Reference, Result, references, results
from rig.bench.views import Cell, Number
from rig.catalog.entries import ROOT
from rigctl.contract.foreign import printable
from rigctl.whole_files import write_whole


def renderer(*, html: bool) -> Jinja:
    """Templates of reports, with the gate for words of others."""
    jinja = Jinja(
        loader=FileSystemLoader(ROOT / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=html,  # noqa: S701  # off for Markdown only
        finalize=shown if html else shown_as_text,
    )
    jinja.filters["cell"] = html_cell if html else text_cell
    return jinja


def shown(value: Any) -> Any:
    """Words in a page of HTML, which escapes them too: hosts and engines have said some of them."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value, keep="\n")


def shown_as_text(value: Any) -> Any:
    """Words in Markdown, where HTML would be taken as such."""
    return escape(printable(value, keep="\n"), quote=False) if isinstance(value, str) else value


def html_cell(cell: Cell) -> Markup:
    """A table cell; numbers keep their ledger entry and key, so that a reader (or a test) can look them up."""
    if isinstance(cell, tuple):
        return Markup("").join(html_cell(item) for item in cell)
    if isinstance(cell, Number):
        return Markup('<data value="{}" data-entry="{}" data-key="{}">{}</data>').format(
            repr(cell.value), cell.entry, cell.path, str(cell)
        )
    return Markup("{}").format(shown(cell) or "")


def text_cell(cell: Cell) -> str:
    """The same for Markdown."""
    if isinstance(cell, tuple):
        return "".join(text_cell(item) for item in cell)
    return str(cell if cell is not None else "").replace("|", "\\|").replace("\n", " ")


def _pictures(study: Study, scene: Scene, number: int) -> list[tuple[Markup, str]]:
    """Pictures of a scene, each with what it shows. number: of the scene in the study."""
    prefix = f"{study.host}-{number}"
    drawn = [
        (
            plots.throughput(study, scene, prefix),
            "Throughput of all streams together, higher is better. Bars reach from the slowest to the fastest round.",
        ),
        (
            plots.latency(study, scene, prefix, "ttft", "p90"),
            "Time to the first token, lower is better: nine of ten requests waited less.",
        ),
        (
            plots.latency(study, scene, prefix, "itl", "p50"),
            "Time between two tokens of one answer, lower is better: the median.",
        ),
    ]
    if any(point.counters.positions for name in study.names for _, point in study.line(scene, name)):
        drawn.append(
            (
                plots.acceptance(study, scene, prefix),
                "Acceptance by position: how often the first, second, ... drafted token was right, at the lowest load. "
                "A line that falls fast says that fewer drafted tokens would do.",
            )
        )
    return [(Markup(picture), words) for picture, words in drawn]  # noqa: S704  # matplotlib's own


def _peaks(entries: Sequence[Reference]) -> Markup | None:
    if not any(entry.figure("peak_tok_s") for entry in entries):
        return None
    return Markup(plots.peaks(entries))  # noqa: S704  # matplotlib's own


def page(entries: Iterable[Result | Reference], now: datetime | None = None) -> str:
    """The HTML page. Raises PlottingMissing without matplotlib."""
    return _render("bench_report.html.j2", entries, now)


def markdown(entries: Iterable[Result | Reference], now: datetime | None = None) -> str:
    """The same for a terminal or a pull request."""
    return _render("bench_report.md.j2", entries, now)


def _models(entries: Iterable[Result | Reference]) -> str:
    """The models that were measured, or those that others reported on."""
    listed = [*entries]
    measured = [one for one in listed if isinstance(one, Result)]
    return ", ".join(sorted({one.configuration.target for one in measured or listed}))


def _render(template: str, entries: Iterable[Result | Reference], now: datetime | None) -> str:
    listed = list(entries)
    return (
        renderer(html=".html" in template)
        .get_template(template)
        .render(
            studies=[*newest(results(listed)).values()],
            reported=views.reference_views(references(listed)),
            views=views,
            recommend=recommend,
            title=f"Serving configurations, measured: {_models(listed) or 'nothing yet'}",
            rule=RULE,
            made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
            pictures=_pictures,
            legend=plots.legend,
            peaks=_peaks,
        )
    )


def write(entries: Sequence[Result | Reference], directory: Path) -> list[Path]:
    """Write report.html and report.md, each whole or not at all. Raises LedgerError when that fails."""
    made = {directory / "report.html": page(entries), directory / "report.md": markdown(entries)}
    for path, text in made.items():
        try:
            write_whole(path, text)
        except OSError as error:
            raise LedgerError(f"{path} cannot be written: {error.strerror}") from None
    return list(made)
