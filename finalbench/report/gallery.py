"""Page -> groups of figures: one group a model, one for the sensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from finalbench.report import acceptance, phrases
from finalbench.report.curves import SERIES_LIMIT, ModelCurves, Tones
from finalbench.report.figures import Figure, Point, Series
from finalbench.report.view import Headline, Page, TelemetrySeries, View


def _spread(page: Page, model: str, slug: str, runs: Sequence[str]) -> Figure | None:
    rows = [row for row in page.spread if row.model == model]
    if not rows:
        return None
    tones = Tones()
    categories = tuple(dict.fromkeys(row.source for row in rows))
    arms = dict.fromkeys((row.arm, row.run_id) for row in rows)
    rows_runs = {row.run_id for row in rows}
    series = []
    for arm, run in list(arms)[:SERIES_LIMIT]:
        own = [row for row in rows if (row.arm, row.run_id) == (arm, run)]
        points = tuple(
            Point(
                x=categories.index(row.source),
                y=row.high_tok_s,
                low=row.low_tok_s,
                high=row.high_tok_s,
                label=phrases.times(row.factor),
            )
            for row in own
        )
        tag = f", run {runs.index(run) + 1}" if len(rows_runs) > 1 and run in runs else ""
        series.append(Series(name=f"{arm}{tag}", tone=tones(arm, f"{arm} {run}"), points=points))
    caution = phrases.caution(rows[0].marks)
    return Figure(
        id=f"{slug}-spread",
        kind="ranges",
        title="Spread: what moves the number",
        caution=caution,
        x_label="Source",
        y_label="Decode tok/s",
        categories=categories,
        series=tuple(series),
    )


def _blocks(headline: Headline, slug: str) -> Figure | None:
    if not headline.pairs or headline.comparison is None:
        return None
    mine, theirs = zip(*headline.pairs, strict=True)

    def series(name: str, tone: int, values: Sequence[float]) -> Series:
        points = tuple(Point(x=i + 1, y=value) for i, value in enumerate(values))
        return Series(name=name, tone=tone, points=points)

    return Figure(
        id=f"{slug}-blocks",
        kind="lines",
        title="Every block, fresh servers each",
        caution=phrases.caution(headline.marks),
        x_label="Block",
        y_label="Decode tok/s",
        series=(
            series(headline.arm_label, 1, mine),
            series(headline.comparison.against_label, 0, theirs),
        ),
    )


def _timeline(series: TelemetrySeries, slug: str) -> Figure:
    points = tuple(Point(x=t, y=v) for t, v in zip(series.t_s, series.values, strict=True))
    return Figure(
        id=slug,
        kind="lines",
        title=f"{series.name} over the run",
        caution="",
        x_label="Seconds from start",
        y_label=f"{series.name} ({series.unit})",
        series=(Series(name=series.name, tone=1, points=points),),
        note=series.run_id,
    )


class FigureGroup(View):
    """The figures of one model, or of one run's sensors."""

    title: str
    figures: tuple[Figure, ...]


def groups(page: Page) -> tuple[FigureGroup, ...]:
    found = []
    # Runs are numbered as they stand in the provenance section.
    runs = [run.id for run in page.runs]
    runs += [cell.run_id for cell in page.cells if cell.run_id not in runs]
    runs = list(dict.fromkeys(runs))
    ordered = sorted(page.cells, key=lambda cell: (cell.marks.weights == "random", cell.model))
    for number, (model, cells) in enumerate(groupby(ordered, key=lambda cell: cell.model)):
        slug = f"m{number + 1}"
        own = ModelCurves(model, list(cells), slug, runs)
        headline = next((h for h in page.headlines if h.model == model), None)
        drawn = [
            _blocks(headline, slug) if headline else None,
            own.by_seq_len(),
            own.by_output_len(),
            own.by_draft(),
            own.by_sampling(),
            acceptance.by_position(own),
            acceptance.roofline(own),
            _spread(page, model, slug, runs),
            *own.by_concurrency(),
        ]
        figures = tuple(figure for figure in drawn if figure)
        if figures:
            found.append(FigureGroup(title=own.name, figures=figures))
    sensors = tuple(
        _timeline(series, f"t{i + 1}") for i, series in enumerate(page.telemetry) if series.t_s
    )
    if sensors:
        found.append(FigureGroup(title="Clocks and power", figures=sensors))
    return tuple(found)
