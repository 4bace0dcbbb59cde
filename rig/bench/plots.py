"""Pictures of the report as inline SVG: text stays text, colours are the page's own and follow dark mode and print."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rig.bench.analysis import Point, Scene, Study, crossing
from rig.bench.ledger import Reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins in the drawing -> variables of the page (templates/bench_report.html.j2).
INK, FAINT = "#010203", "#040506"
LINES = [f"#0a0b{index:02x}" for index in range(8)]
_COLOURS = {INK: "var(--ink)", FAINT: "var(--faint)"} | {c: f"var(--line{n})" for n, c in enumerate(LINES)}
_MARKERS = "osD^vPX*"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kimi-rig",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


class PlottingMissing(Exception):
    """matplotlib is not installed."""


def _pyplot() -> Any:
    try:
        import matplotlib  # noqa: PLC0415  # heavy, and needed for reports only

        matplotlib.use("svg")
        from matplotlib import pyplot  # noqa: PLC0415  # as above
    except ImportError:
        raise PlottingMissing(
            "the report needs matplotlib: .venv/bin/python -m pip install --require-hashes -r requirements/bench.txt"
        ) from None
    return pyplot


def throughput(study: Study, scene: Scene, prefix: str) -> str:
    """Output tok/s of all streams against concurrency, ranges as bars, crossovers as dotted lines."""
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6, 4.2))
        for number, name in enumerate(study.names):
            line = study.line(scene, name)
            if line:
                _draw(axes, number, name, line)
            if (at := crossing(study, scene, name)) is not None:
                axes.axvline(at, color=LINES[number % len(LINES)], linestyle=":", linewidth=1.5)
                place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "va": "bottom", "ha": "right"}
                axes.text(at, 0.03, f"crossover {at:.1f}", **place)
        _axes(axes, "concurrent requests", "output tokens a second, all streams", study.concurrencies(scene))
        return _svg(pyplot, figure, f"{prefix}-throughput")


def latency(study: Study, scene: Scene, prefix: str) -> str:
    """Time to the first token (p90) and between tokens (p50) against concurrency."""
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, (first, between) = pyplot.subplots(2, 1, figsize=(6, 6), sharex=True)
        for axes, kind, quantile in ((first, "ttft", "p90"), (between, "itl", "p50")):
            for number, name in enumerate(study.names):
                line = study.line(scene, name)
                values = [point.middle(kind, quantile) for _, point in line]
                axes.plot([c for c, _ in line], values, **_look(number), label=name)
        _axes(first, "", "first token p90, ms", study.concurrencies(scene))
        _axes(between, "concurrent requests", "between tokens p50, ms", study.concurrencies(scene))
        between.get_legend().remove()
        return _svg(pyplot, figure, f"{prefix}-latency")


def acceptance(study: Study, scene: Scene, prefix: str) -> str:
    """Accepted share of the drafted tokens by position, at the lowest concurrency measured."""
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6, 3.2))
        longest = 0
        for number, name in enumerate(study.names):
            line = [point for _, point in study.line(scene, name) if point.positions]
            if line:
                shares = [100 * share for share in line[0].positions]
                longest = max(longest, len(shares))
                axes.plot(range(len(shares)), shares, **_look(number), label=name)
        axes.set_ylim(-3, 103)
        axes.set_xticks(range(longest))
        axes.set_xlabel("position of the drafted token")
        axes.set_ylabel("accepted, %")
        axes.grid(alpha=0.4)
        axes.legend()
        return _svg(pyplot, figure, f"{prefix}-acceptance")


def peaks(entries: Sequence[Reference]) -> str:
    """Reported peaks as bars, each with its limit of running requests where one is known."""
    shown = [(e, figure.value) for e in entries if (figure := e.figure("peak_tok_s")) and figure.value is not None]
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6, 0.7 * len(shown) + 1))
        for row, (entry, value) in enumerate(reversed(shown)):
            axes.barh(row, value, color=LINES[1 if entry.configuration.drafter else 0], height=0.55)
            limit = entry.configuration.effective_limit
            axes.annotate(f" {value:,.0f}" + (f", at most {limit} running" if limit else ""), (value, row), va="center")
        axes.set_yticks(range(len(shown)), [entry.configuration.name for entry, _ in reversed(shown)])
        axes.set_xlim(0, 1.25 * max((value for _, value in shown), default=1))
        axes.set_xlabel("reported peak, tokens a second")
        return _svg(pyplot, figure, "peaks")


def _look(number: int) -> dict[str, Any]:
    return {
        "color": LINES[number % len(LINES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": "-" if number == 0 else "--",
        "linewidth": 1.8,
    }


def _draw(axes: Axes, number: int, name: str, line: Sequence[tuple[int, Point]]) -> None:
    medians = [point.total.median for _, point in line]
    below = [point.total.median - point.total.low for _, point in line]
    above = [point.total.high - point.total.median for _, point in line]
    axes.errorbar([c for c, _ in line], medians, yerr=[below, above], capsize=3, **_look(number), label=name)


def _axes(axes: Axes, x: str, y: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.4)
    axes.legend()


def _svg(pyplot: Any, figure: Any, prefix: str) -> str:
    """The drawing, without its XML head, with ids of its own and the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        r'<svg viewBox="\1" xmlns:xlink="http://www.w3.org/1999/xlink">',
        text,
        count=1,
    )
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", text)
    for stand_in, variable in _COLOURS.items():
        text = text.replace(stand_in, variable)
    return re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif", text).strip()
