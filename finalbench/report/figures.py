"""A figure as data: which series, which points, which words. Drawing is `plots`' affair."""

from __future__ import annotations

from typing import Literal

from finalbench.report import phrases
from finalbench.report.entries import Column, Entry, Table
from finalbench.report.view import View


class Point(View):
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


class Series(View):
    """`joined`: a line runs through the points; without it each stands for itself."""

    name: str
    tone: int
    points: tuple[Point, ...]
    reference: bool = False
    joined: bool = True


class Figure(View):
    """`categories` name the integer x of bars and ranges; `log_x` marks the x values as ticks."""

    id: str
    kind: Literal["lines", "bars", "ranges"]
    title: str
    caution: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    log_x: bool = False
    top: float | None = None
    note: str = ""

    @property
    def description(self) -> str:
        """The figure in words, for those who cannot see it."""
        parts = []
        for series in self.series:
            ys = [point.y for point in series.points]
            parts.append(
                f"{series.name}: {phrases.significant(min(ys), 3)} to "
                f"{phrases.significant(max(ys), 3)}"
            )
        return f"{self.y_label} by {self.x_label.lower()}. " + "; ".join(parts) + "."


def numbers(figure: Figure) -> Table:
    """The same numbers as the picture, as a table."""
    columns = (
        Column(key="series", label="Series"),
        Column(key="x", label=figure.x_label, numeric=not figure.categories),
        Column(key="y", label=figure.y_label, numeric=True),
    )
    rows = []
    for series in figure.series:
        for point in series.points:
            named = figure.categories and not series.reference
            x = figure.categories[int(point.x)] if named else phrases.significant(point.x, 4)
            if series.reference and figure.categories:
                x = "all"
            note = ""
            if point.low is not None and point.high is not None:
                low, high = phrases.significant(point.low), phrases.significant(point.high)
                note = f"[{low}, {high}]"
            entry = Entry(
                text=phrases.significant(point.y),
                notes=tuple(word for word in (note, figure.caution) if word),
                value=point.y,
            )
            rows.append((Entry(text=series.name), Entry(text=x), entry))
    return Table(
        id=f"{figure.id}-numbers",
        caption=f"{figure.title}: numbers",
        columns=columns,
        rows=tuple(rows),
        cautions=(figure.caution,) * len(rows),
    )
