"""What drafts bring: acceptance by position, and the rate it gives under the memory's limit."""

from __future__ import annotations

from finalbench.report.curves import DRAFTS_OFF, SERIES_LIMIT, ModelCurves, Tones, point, words_of
from finalbench.report.figures import Figure, Point, Series
from finalbench.report.view import Cell


def by_position(curves: ModelCurves) -> Figure | None:
    cells = [cell for cell in curves.base_length() if cell.accepted_per_position]
    series = []
    for cell in cells[:SERIES_LIMIT]:
        name = f"{cell.draft}, {cell.sampling}{curves.run_tag[cell.run_id]}"
        points = tuple(Point(x=i + 1, y=rate) for i, rate in enumerate(cell.accepted_per_position))
        series.append(Series(name=name, tone=1 + len(series) % 7, points=points))
    if not series:
        return None
    return Figure(
        id=f"{curves.slug}-position",
        kind="lines",
        title="Acceptance by draft position",
        caution=words_of(cells),
        x_label="Draft position",
        y_label="Accepted share of rounds",
        series=tuple(series),
        top=1.0,
    )


def roofline(curves: ModelCurves) -> Figure | None:
    """Every draft setting at its acceptance, under what the memory's bandwidth allows there."""
    cells = [
        cell
        for cell in curves.base_length()
        if cell.limit_tok_s and cell.decode_tok_s.value is not None
    ]
    if not cells:
        return None
    tones, several = Tones(), len({cell.sampling for cell in cells}) > 1
    series = []
    for title in dict.fromkeys(curves.arm(cell) for cell in cells):
        own = [cell for cell in cells if curves.arm(cell) == title]
        points = tuple(
            found
            for cell in own
            if (found := point(_length(cell), cell.decode_tok_s, _k(cell, several)))
        )
        tone = tones(title, f"{own[0].arm} {own[0].run_id}")
        series.append(Series(name=title, tone=tone, points=points, joined=False))
    limits = {(_length(cell), cell.limit_tok_s or 0.0) for cell in cells}
    line = tuple(Point(x=x, y=y) for x, y in sorted(limits))
    return Figure(
        id=f"{curves.slug}-roofline",
        kind="lines",
        title="By acceptance and k, under the memory limit",
        caution=words_of(cells),
        x_label="Acceptance length, tokens per round",
        y_label="Decode tok/s",
        series=(
            *series[:SERIES_LIMIT],
            Series(name="memory bandwidth limit", tone=0, points=line, reference=True),
        ),
    )


def _length(cell: Cell) -> float:
    """Tokens a round; one where nothing is drafted."""
    return cell.acceptance_length or 1.0


def _k(cell: Cell, several: bool) -> str:
    if cell.arm.startswith("stock"):
        return ""
    name = "off" if cell.draft == DRAFTS_OFF else cell.draft.removeprefix("mtp ")
    return f"{name}, {cell.sampling}" if several else name
