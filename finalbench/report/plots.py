"""Figure -> inline SVG text: the same bytes everywhere, colours left to the page's style sheet."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from finalbench.report import phrases
from finalbench.report.figures import Figure, Series

# Placeholder colours, replaced by style-sheet variables after drawing: a page can then follow
# the reader's light or dark mode without a second picture.
INK = "#010205"
GRID = "#010203"
MUTED = "#010204"
TONES = tuple(f"#0102{i:02x}" for i in range(0x10, 0x18))
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "-", "--", "-.", ":", "--", "-.", ":")
_COLOURS = {
    INK: "currentColor",
    GRID: "var(--grid)",
    MUTED: "var(--muted)",
    **{tone: f"var(--s{i})" for i, tone in enumerate(TONES)},
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "finalbench",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "errorbar.capsize": 3,
}


def svg(figure: Figure) -> str:
    """One `<svg role="img">` with title and description, safe to inline beside others."""
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(5.6, 3.5))
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        {"lines": _lines, "bars": _bars, "ranges": _ranges}[figure.kind](axes, figure)
        _legend(canvas, figure)
        canvas.subplots_adjust(
            left=0.25 if figure.kind == "ranges" else 0.11,
            right=0.98,
            top=_top(figure),
            bottom=0.14,
        )
        out = io.StringIO()
        canvas.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return _inline(out.getvalue(), figure)


def _top(figure: Figure) -> float:
    rows = -(-len(figure.series) // 2)
    return 0.915 - 0.065 * rows


def _legend(canvas: Canvas, figure: Figure) -> None:
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2 if len(labels) > 1 else 1,
        columnspacing=1.4,
        handlelength=1.8,
        borderaxespad=0.1,
    )
    if figure.caution:
        canvas.axes[0].set_title(figure.caution, loc="right", fontsize=8.5, color=MUTED, pad=5)


def _frame(axes: Axes, figure: Figure, highest: float) -> None:
    axes.set_xlabel(figure.x_label)
    axes.set_title(figure.y_label, loc="left", fontsize=9.5, color=MUTED, pad=5)
    axes.set_ylim(0, figure.top * 1.02 if figure.top else highest * 1.08 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _error(series: Series) -> tuple[list[float], list[float]] | None:
    if any(point.low is None or point.high is None for point in series.points):
        return None
    below = [max(0.0, point.y - (point.low or 0.0)) for point in series.points]
    above = [max(0.0, (point.high or 0.0) - point.y) for point in series.points]
    return below, above


def _highest(figure: Figure) -> float:
    return max(max(p.y, p.high or p.y) for series in figure.series for p in series.points)


def _lines(axes: Axes, figure: Figure) -> None:
    for index, series in enumerate(figure.series):
        xs = [point.x for point in series.points]
        ys = [point.y for point in series.points]
        tone = TONES[series.tone]
        if series.reference:
            draw = axes.plot if len(xs) > 1 else lambda x, y, **how: axes.axhline(y[0], **how)
            draw(xs, ys, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.4, label=series.name)
            continue
        many = len(xs) > 40
        axes.errorbar(
            xs,
            ys,
            yerr=_error(series),
            color=tone,
            marker="" if many else MARKERS[series.tone],
            linestyle=_dash(series, index),
            linewidth=1.2 if many else 2.0,
            elinewidth=1.4,
            label=series.name,
        )
        _labels(axes, series)
    _frame(axes, figure, _highest(figure))
    xs = sorted({point.x for series in figure.series for point in series.points})
    if figure.log_x and xs[0] > 0:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(FixedLocator(xs))
        axes.set_xticklabels([f"{x:g}" for x in xs])
    elif all(x == int(x) for x in xs) and len(xs) <= 16:
        axes.xaxis.set_major_locator(FixedLocator(xs))
        axes.set_xlim(xs[0] - 0.4, xs[-1] + 0.4)


def _dash(series: Series, index: int) -> str:
    if not series.joined:
        return "none"
    return DASHES[index % len(DASHES)] if series.tone else "-"


def _labels(axes: Axes, series: Series) -> None:
    """Names beside points, above and below in turn, so that close ones stay legible."""
    named = sorted((point for point in series.points if point.label), key=lambda point: point.x)
    axes.margins(x=0.12 if named else 0.05)
    for index, point in enumerate(named):
        high = index % 2 == 0
        y = (point.high if high else point.low) or point.y
        at: dict[str, Any] = {"xytext": (0, 5 if high else -5), "va": "bottom" if high else "top"}
        axes.annotate(
            point.label, (point.x, y), textcoords="offset points", ha="center", fontsize=8.5, **at
        )


def _bars(axes: Axes, figure: Figure) -> None:
    bars = [series for series in figure.series if not series.reference]
    width = 0.72 / len(bars)
    for index, series in enumerate(bars):
        offset = (index - (len(bars) - 1) / 2) * width
        xs = [point.x + offset for point in series.points]
        ys = [point.y for point in series.points]
        axes.bar(
            xs,
            ys,
            width * 0.92,
            color=TONES[series.tone],
            yerr=_error(series),
            error_kw={"ecolor": INK, "elinewidth": 1.2},
            label=series.name,
        )
        for x, point in zip(xs, series.points, strict=True):
            tip = max(point.y, point.high or 0.0)
            axes.annotate(
                phrases.significant(point.y, 3),
                (x, tip),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
    for series in figure.series:
        if series.reference:
            axes.axhline(
                series.points[0].y,
                color=TONES[series.tone],
                linestyle=(0, (4, 3)),
                label=series.name,
            )
    _frame(axes, figure, _highest(figure) * 1.05)
    axes.set_xticks(range(len(figure.categories)), [_short(name) for name in figure.categories])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.55, len(figure.categories) - 0.45)


def _ranges(axes: Axes, figure: Figure) -> None:
    height = 0.7 / len(figure.series)
    for index, series in enumerate(figure.series):
        tone = TONES[series.tone]
        for number, point in enumerate(series.points):
            y = point.x + (index - (len(figure.series) - 1) / 2) * height
            low = point.low or 0.0
            axes.plot(
                [low, point.y],
                [y, y],
                color=tone,
                linewidth=3.5,
                marker=MARKERS[series.tone],
                markersize=5,
                solid_capstyle="butt",
                label=series.name if number == 0 else "_",
            )
            axes.annotate(
                point.label,
                (point.y, y),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
    axes.set_title(figure.y_label, loc="left", fontsize=9.5, color=MUTED, pad=5)
    axes.set_xlim(0, _highest(figure) * 1.15)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(figure.categories)), list(figure.categories))
    axes.set_ylim(len(figure.categories) - 0.5, -0.5)
    axes.tick_params(axis="y", labelcolor=INK)


def _short(name: str) -> str:
    """Long category names break at the first comma or space that helps."""
    if len(name) <= 11:
        return name
    for mark in (", ", " "):
        head, found, tail = name.partition(mark)
        if found:
            return f"{head}{mark.rstrip()}\n{tail}"
    return name


_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_ATTRIBUTE_ID = re.compile(r'id="([^"]+)"')


def _inline(text: str, figure: Figure) -> str:
    """Strip what only a separate file needs, give ids a prefix, hand colours to the page."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = _NUMBER.sub(lambda match: f"{float(match[0]):.2f}", body)
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', body))

    def keep(match: re.Match[str]) -> str:
        return f'id="{figure.id}-{match[1]}"' if match[1] in used else ""

    body = _ATTRIBUTE_ID.sub(keep, body)
    body = re.sub(r'xlink:href="#', f'href="#{figure.id}-', body)
    body = re.sub(r"url\(#", f"url(#{figure.id}-", body)
    for placeholder, name in _COLOURS.items():
        body = body.replace(placeholder, name)
    body = body.replace("'DejaVu Sans'", "var(--font)")
    body = re.sub(r"\s*<g >\s*</g>", "", re.sub(r" +(?=[>/])", "", body))
    view_box = re.search(r'viewBox="([^"]+)"', body)
    head = (
        f'<svg class="plot" role="img" viewBox="{view_box[1] if view_box else "0 0 403 252"}" '
        f'aria-labelledby="{figure.id}-title {figure.id}-desc">'
        f'<title id="{figure.id}-title">{escape(_spoken(figure))}</title>'
        f'<desc id="{figure.id}-desc">{escape(figure.description)}</desc>'
    )
    return head + re.sub(r"^<svg[^>]*>", "", body).strip()


def _spoken(figure: Figure) -> str:
    return f"{figure.title} ({figure.caution})" if figure.caution else figure.title
