"""Pictures of the report as inline SVG: text stays text, colours are the page's own and follow dark mode and print."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rig.bench.analysis import Scene, Study, crossing
from rig.bench.ledger import Reference
from rigctl.errors import RigctlError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins in the drawing -> variables of the page (templates/bench_report.html.j2).
INK, FAINT = "#010203", "#040506"
LINES = [f"#0a0b{index:02x}" for index in range(8)]
_COLOURS = {INK: "var(--ink)", FAINT: "var(--faint)"} | {c: f"var(--line{n})" for n, c in enumerate(LINES)}
_MARKERS = {
    "o": "\u25cf",
    "s": "\u25a0",
    "D": "\u25c6",
    "^": "\u25b2",
    "v": "\u25bc",
    "P": "\u271a",
    "X": "\u2716",
    "*": "\u2605",
}
"""Marker in a picture -> the same in the page's legend."""
HEIGHT = 3.4
"""Inches of a picture that is 6 wide: all of a scene have the same, so that none leaves a hole beside it."""
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


class PlottingMissing(RigctlError):
    """matplotlib is not installed."""


def _picture(prefix: str, height: float, draw: Callable[[Axes], None]) -> str:
    """One SVG of what `draw` draws. prefix: of the ids in it."""
    try:
        import matplotlib  # noqa: PLC0415  # heavy, and needed for reports only

        matplotlib.use("svg")
        from matplotlib import pyplot  # noqa: PLC0415  # as above
    except ImportError:
        raise PlottingMissing(
            "the report needs matplotlib: .venv/bin/python -m pip install --require-hashes -r requirements/bench.txt"
        ) from None
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6, height), layout="constrained")
        draw(axes)
        return _svg(pyplot, figure, prefix)


def throughput(study: Study, scene: Scene, prefix: str) -> str:
    """Output tok/s of all streams against concurrency, ranges as bars, crossovers as dotted lines."""

    def draw(axes: Axes) -> None:
        for number, name in enumerate(study.names):
            if line := study.line(scene, name):
                totals = [point.total for _, point in line]
                below, above = [one.median - one.low for one in totals], [one.high - one.median for one in totals]
                look = {**_look(number, name), "yerr": [below, above], "capsize": 3}
                axes.errorbar([c for c, _ in line], [one.median for one in totals], **look)
            if (at := crossing(study, scene, name)) is not None:
                axes.axvline(at, color=LINES[number % len(LINES)], linestyle=":", linewidth=1.5)
                place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right"}
                axes.text(at, 0.97, f"crossover {at:.1f}", **place)
        _axes(axes, "output tokens a second, all streams", study.concurrencies(scene))

    return _picture(f"{prefix}-throughput", HEIGHT, draw)


def latency(study: Study, scene: Scene, prefix: str, kind: str, quantile: str) -> str:
    """A quantile of a time in ms (ttft: to the first token, itl: between tokens) against concurrency."""

    def draw(axes: Axes) -> None:
        for number, name in enumerate(study.names):
            line = study.line(scene, name)
            values = [point.middle(kind, quantile) for _, point in line]
            axes.plot([c for c, _ in line], values, **_look(number, name))
        _axes(axes, "milliseconds", study.concurrencies(scene))

    return _picture(f"{prefix}-{kind}", HEIGHT, draw)


def acceptance(study: Study, scene: Scene, prefix: str) -> str:
    """Accepted share of the drafted tokens by position, at the lowest concurrency measured."""

    def draw(axes: Axes) -> None:
        longest = 0
        for number, name in enumerate(study.names):
            counted = (point.counters.positions for _, point in study.line(scene, name) if point.counters.positions)
            if shares := [100 * share for share in next(counted, [])]:
                longest = max(longest, len(shares))
                axes.plot(range(1, len(shares) + 1), shares, **_look(number, name))
        ticks = range(1, longest + 1)
        axes.set(ylim=(-3, 103), xlabel="position of the drafted token", ylabel="accepted, %", xticks=ticks)
        axes.grid(alpha=0.4)

    return _picture(f"{prefix}-acceptance", HEIGHT, draw)


def ladder(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Acceptance length against the conversations that a drafter was trained on, a line for each name."""
    longest = max((length for line in lines.values() for _, length in line), default=1)

    def draw(axes: Axes) -> None:
        for number, (name, line) in enumerate(lines.items()):
            axes.plot([count for count, _ in line], [length for _, length in line], **_look(number, name))
        # Rungs rise tenfold; the start, without any, stands left of them.
        smallest = min(count for line in lines.values() for count, _ in line if count)
        axes.set_xscale("symlog", linthresh=smallest)
        counts = sorted({count for line in lines.values() for count, _ in line})
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.set(xlabel="conversations", ylabel="acceptance length", ylim=(0.9, longest + 0.2))
        axes.grid(alpha=0.4)
        axes.legend()

    return _picture("ladder", 4.2, draw)


def peaks(entries: Sequence[Reference]) -> str:
    """Reported peaks as bars, each with its limit of running requests where one is known."""
    shown = [(e, figure.value) for e in entries if (figure := e.figure("peak_tok_s")) and figure.value is not None]
    shown.reverse()

    def draw(axes: Axes) -> None:
        for row, (entry, value) in enumerate(shown):
            axes.barh(row, value, color=LINES[1 if entry.configuration.drafter else 0], height=0.55)
            limit = entry.configuration.effective_limit
            axes.annotate(f" {value:,.0f}" + (f", at most {limit} running" if limit else ""), (value, row), va="center")
        axes.set_yticks(range(len(shown)), [entry.configuration.name for entry, _ in shown])
        highest = max((value for _, value in shown), default=1)
        axes.set(xlim=(0, 1.25 * highest), xlabel="reported peak, tokens a second")

    return _picture("peaks", 0.7 * len(shown) + 1, draw)


def _look(number: int, name: str) -> dict[str, Any]:
    return {
        "color": LINES[number % len(LINES)],
        "marker": [*_MARKERS][number % len(_MARKERS)],
        "linestyle": "-" if number == 0 else "--",
        "linewidth": 1.8,
        "label": name,
    }


def legend(study: Study) -> list[tuple[str, str, str]]:
    """Marker, colour of the page and name of each line, for all pictures of a study."""
    marks = [*_MARKERS.values()]
    return [
        (marks[number % len(marks)], f"var(--line{number % len(LINES)})", name)
        for number, name in enumerate(study.names)
    ]


def _axes(axes: Axes, y: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="concurrent requests", ylabel=y)
    axes.grid(alpha=0.4)


def _svg(pyplot: Any, figure: Any, prefix: str) -> str:
    """The drawing, without its XML head, with ids of its own and the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    for pattern, replacement in (
        (r"\A.*?(?=<svg)|<metadata>.*?</metadata>", ""),
        (r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" xmlns:xlink="http://www.w3.org/1999/xlink">'),
        (r'\bid="([^"]+)"', rf'id="{prefix}-\1"'),
        (r'(url\(#|href="#)', rf"\1{prefix}-"),
        (r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif"),
        *_COLOURS.items(),
    ):
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text.strip()
