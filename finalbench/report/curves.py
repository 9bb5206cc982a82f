"""The curves of one model: its rate along each axis, its acceptance, its distance to the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from finalbench.report import phrases
from finalbench.report.figures import Figure, Point, Series
from finalbench.report.view import Cell, Marks, Measured

SERIES_LIMIT = 8
DRAFTS_OFF = "drafts off"
_FIRST = (DRAFTS_OFF, "greedy")


def point(x: float, measured: Measured, label: str = "") -> Point | None:
    if measured.value is None:
        return None
    interval = measured.interval
    return Point(
        x=x,
        y=measured.value,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        label=label,
    )


class Tones:
    """A baseline is grey (0); an arm's first series keeps one colour through all its figures."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def __call__(self, name: str, arm: str) -> int:
        if arm.startswith("stock"):
            return 0
        name = arm if self._first.setdefault(arm, name) == name else name
        return self._given.setdefault(name, 1 + len(self._given) % 7)


def words_of(cells: Iterable[Cell]) -> str:
    found = [cell.marks for cell in cells]
    marks = Marks(
        weights="random" if any(m.weights == "random" for m in found) else "real",
        acceptance="synthetic" if any(m.acceptance == "synthetic" for m in found) else "measured",
        equality="divergent" if any(m.equality == "divergent" for m in found) else "identical",
        status="verified" if all(m.status == "verified" for m in found) else "self-reported",
    )
    return phrases.caution(marks)


_AXES = ("seq_len", "output_len", "sampling", "draft", "concurrency", "cache")


def _on_axis(cells: Sequence[Cell], axis: str) -> list[Cell]:
    """Cells at the base setting in all but this axis, drafts on or off; empty where it is fixed."""
    bases = {cell.run_id: cell for cell in reversed(cells) if cell.axis == "base"}
    drafts = {(cell.run_id, cell.draft) for cell in cells if cell.axis == "base"}
    drafts |= {(run, DRAFTS_OFF) for run in bases}
    chosen = []
    for cell in cells:
        base = bases.get(cell.run_id)
        if base is None or (axis != "draft" and (cell.run_id, cell.draft) not in drafts):
            continue
        others = [name for name in _AXES if name not in (axis, "draft")]
        if all(getattr(cell, name) == getattr(base, name) for name in others):
            chosen.append(cell)
    values: dict[str, set[object]] = {}
    for cell in chosen:
        values.setdefault(cell.run_id, set()).add(getattr(cell, axis))
    return [cell for cell in chosen if len(values[cell.run_id]) > 1]


def _lines(
    cells: Sequence[Cell],
    x: Callable[[Cell], float],
    y: Callable[[Cell], Measured],
    name: Callable[[Cell], str],
    tones: Tones,
) -> tuple[Series, ...]:
    series = []
    names = dict.fromkeys(name(cell) for cell in cells)
    for title in names:
        own = [cell for cell in cells if name(cell) == title]
        points = [found for cell in own if (found := point(x(cell), y(cell)))]
        if points:
            ordered = tuple(sorted(points, key=lambda point: point.x))
            arm = f"{own[0].arm} {own[0].run_id}"
            series.append(Series(name=title, tone=tones(title, arm), points=ordered))
    return tuple(series[:SERIES_LIMIT])


class ModelCurves:
    """One model's cells, with the names its series carry."""

    def __init__(self, model: str, cells: Sequence[Cell], slug: str, runs: Sequence[str]) -> None:
        # A copy of a server stands in the A/A table, not in the curves.
        self.cells = [cell for cell in cells if not cell.arm.endswith("-aa")]
        self.slug = slug
        self.name = phrases.shape_name(model, cells[0].marks)
        self.tones = Tones()
        several = len({cell.run_id for cell in cells}) > 1
        self.run_tag = {run: f", run {i + 1}" if several else "" for i, run in enumerate(runs)}

    def arm(self, cell: Cell) -> str:
        return f"{cell.arm_label}{self.run_tag[cell.run_id]}"

    def arm_and_draft(self, cell: Cell) -> str:
        stock = cell.arm.startswith("stock")
        return self.arm(cell) if stock else f"{self.arm(cell)}, {cell.draft}"

    def base_length(self) -> list[Cell]:
        """Cells that differ from the base in drafts or sampling only."""
        found = {
            (c.run_id, c.id): c
            for axis in ("draft", "sampling")
            for c in _on_axis(self.cells, axis)
        }
        return list(found.values()) or [cell for cell in self.cells if cell.axis == "base"]

    def _by_length(self, axis: str, title: str, x_label: str) -> Figure | None:
        cells = _on_axis(self.cells, axis)
        series = _lines(
            cells,
            lambda c: getattr(c, axis),
            lambda c: c.decode_tok_s,
            self.arm_and_draft,
            self.tones,
        )
        if not series:
            return None
        return Figure(
            id=f"{self.slug}-{axis}",
            kind="lines",
            title=title,
            caution=words_of(cells),
            x_label=x_label,
            y_label="Decode tok/s",
            series=series,
            log_x=True,
        )

    def by_seq_len(self) -> Figure | None:
        return self._by_length("seq_len", "By prompt length", "Prompt tokens")

    def by_output_len(self) -> Figure | None:
        return self._by_length("output_len", "By output length", "Output tokens")

    def _bars(
        self, axis: str, title: str, label: Callable[[Cell], str], x_label: str
    ) -> Figure | None:
        cells = _on_axis(self.cells, axis)
        if not cells:
            return None
        name = self.arm if axis == "draft" else self.arm_and_draft
        tones = Tones() if axis == "draft" else self.tones
        lone = {
            name(cell)
            for cell in cells
            if len({label(other) for other in cells if name(other) == name(cell)}) == 1
        }
        bars = [cell for cell in cells if not (axis == "draft" and name(cell) in lone)]
        names = dict.fromkeys(label(cell) for cell in bars)
        categories = tuple(sorted(names, key=lambda name: (name not in _FIRST, name)))
        series = _lines(
            bars,
            lambda c: categories.index(label(c)),
            lambda c: c.decode_tok_s,
            name,
            tones,
        )
        lines = [cell for cell in cells if cell not in bars]
        references = _lines(lines, lambda c: 0.0, lambda c: c.decode_tok_s, name, tones)
        if not series:
            return None
        return Figure(
            id=f"{self.slug}-{axis}",
            kind="bars",
            title=title,
            caution=words_of(cells),
            x_label=x_label,
            y_label="Decode tok/s",
            categories=categories,
            series=series
            + tuple(line.model_copy(update={"reference": True}) for line in references),
        )

    def by_draft(self) -> Figure | None:
        return self._bars("draft", "By draft setting", lambda c: c.draft, "Draft")

    def by_sampling(self) -> Figure | None:
        return self._bars("sampling", "By sampling", lambda c: c.sampling, "Sampling")

    def by_concurrency(self) -> Iterable[Figure]:
        cells = _on_axis(self.cells, "concurrency")
        rate = _lines(
            cells,
            lambda c: c.concurrency,
            lambda c: c.e2e_tok_s,
            self.arm_and_draft,
            self.tones,
        )
        late = _lines(
            cells, lambda c: c.concurrency, lambda c: c.e2e_p50_s, self.arm_and_draft, self.tones
        )
        # Only cells with requests enough have a p99.
        late += _lines(
            cells,
            lambda c: c.concurrency,
            lambda c: c.e2e_p99_s,
            lambda c: f"{self.arm_and_draft(c)}, p99",
            Tones(),
        )
        for tail, title, unit, series in (
            ("throughput", "Throughput by streams", "End-to-end tok/s, all streams", rate),
            (
                "latency",
                "Latency by streams",
                "Seconds to the last token, p50",
                late[:SERIES_LIMIT],
            ),
        ):
            if series:
                yield Figure(
                    id=f"{self.slug}-{tail}",
                    kind="lines",
                    title=title,
                    caution=words_of(cells),
                    x_label="Concurrent streams",
                    y_label=unit,
                    series=series[:SERIES_LIMIT],
                    log_x=True,
                )
