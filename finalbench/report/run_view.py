"""One analysed run in the page's words: its names, its headline, its cells."""

from __future__ import annotations

from collections.abc import Sequence

from finalbench.aggregate import Analysis, ResultRow
from finalbench.arms import ARMS, ENGINES
from finalbench.metrics import CellRow
from finalbench.record import RunRecords
from finalbench.report import phrases, view
from finalbench.validity import Violation


class RunView:
    """One run's analysis, told in the page's words."""

    def __init__(self, records: RunRecords, analysis: Analysis) -> None:
        self.records = records
        self.analysis = analysis
        self.run_id = analysis.run_id
        self.model = analysis.model
        self._profile = records.run.scenario.serving.vk_profile

    def arm_label(self, arm: str) -> str:
        name = arm.removesuffix("-aa")
        peer = name in ARMS and ARMS[name].peer
        label = ENGINES[ARMS[name].engine].title if peer else name
        label = self._profile.upper() if name == "vk" else label
        return label if name == arm else f"{label} (copy)"

    def headline(self) -> view.Headline:
        head = self.analysis.headline
        row = next((r for r in self.analysis.rows if r.cell.id == head.cell_id), None)
        comparison = row.comparison if row else None
        pairs = comparison.pairs if comparison else ()
        reason = head.reasons.get("decode_tok_s")
        return view.Headline(
            run_id=self.run_id,
            model=self.model,
            hardware=self.analysis.hardware,
            arm_label=self.arm_label(head.arm),
            setting=self.setting(row.cell) if row else "no base cell",
            decode_tok_s=self.decode(row.cell) if row and row.valid else _null(reason),
            comparison=self.comparison(row) if row else None,
            acceptance_length=head.acceptance_length,
            bandwidth_share=head.bandwidth_share,
            marks=marks_of(row) if row else view.Marks(weights=head.weights),
            pairs=tuple((pair.candidate, pair.baseline) for pair in pairs),
        )

    def setting(self, cell: CellRow) -> str:
        lengths = f"{cell.seq_len} tokens in, {cell.output_len} out"
        cache = f", {cell.cache_label}" if cell.cache_label else ""
        return f"{lengths}, {cell.sampling}, {draft_label(cell)}{cache}"

    def decode(self, cell: CellRow) -> view.Measured:
        blocks = tuple(value for value in cell.decode_tok_s_blocks if value is not None)
        return view.Measured(
            value=cell.decode_tok_s,
            interval=interval_of(cell.decode_tok_s_interval),
            blocks=blocks,
            reason=cell.reasons.get("decode_tok_s"),
        )

    def comparison(self, row: ResultRow) -> view.Comparison | None:
        found = row.comparison
        if found is None:
            return None
        ratios = tuple(pair.candidate / pair.baseline for pair in found.pairs if pair.baseline)
        return view.Comparison(
            against=found.against,
            against_label=self.arm_label(found.against),
            against_decode_tok_s=found.against_value,
            ratio=view.Measured(
                value=found.ratio,
                interval=interval_of(found.ratio_interval),
                blocks=ratios,
                reason=found.reason,
            ),
            verdict=found.verdict.value,
        )

    def cells(self) -> list[view.Cell]:
        return [self._cell(row) for row in self.analysis.rows]

    def _cell(self, row: ResultRow) -> view.Cell:
        cell = row.cell
        reasons = cell.reasons
        return view.Cell(
            run_id=self.run_id,
            id=cell.id,
            model=self.model,
            arm=cell.arm,
            arm_label=self.arm_label(cell.arm),
            axis=cell.axis,
            seq_len=cell.seq_len,
            output_len=cell.output_len,
            sampling=cell.sampling,
            draft=draft_label(cell),
            concurrency=cell.concurrency,
            text_class=cell.text_class,
            cache=cell.cache,
            cache_label=cell.cache_label,
            requests=cell.counts.recorded - cell.counts.warmup,
            failed=cell.counts.failed + cell.counts.cancelled + cell.counts.incomplete,
            decode_tok_s=self.decode(cell),
            e2e_tok_s=view.Measured(value=cell.e2e_tok_s, reason=reasons.get("e2e_tok_s")),
            steady_tok_s=view.Measured(value=cell.steady_tok_s, reason=reasons.get("steady_tok_s")),
            ttft_p50_s=_quantile(cell, "ttft_s", "p50"),
            e2e_p50_s=_quantile(cell, "e2e_s", "p50"),
            e2e_p99_s=_quantile(cell, "e2e_s", "p99"),
            acceptance_length=cell.acceptance_length,
            accepted_per_position=cell.acceptance.per_position,
            bandwidth_share=cell.bandwidth_share,
            limit_tok_s=cell.limit_tok_s,
            comparison=self.comparison(row),
            marks=marks_of(row),
            violations=_rules(row.violations, "invalid"),
            warnings=_rules(row.violations, "warning"),
        )

    def cell_name(self, cell_id: str | None) -> str:
        if cell_id is None:
            return "the whole run"
        row = next((r for r in self.analysis.rows if r.cell.id == cell_id), None)
        if row is None:
            return cell_id
        return f"{self.arm_label(row.cell.arm)}, {self.setting(row.cell)}"

    def arms(self) -> list[str]:
        return list(dict.fromkeys(row.cell.arm for row in self.analysis.rows))

    def base(self, arm: str) -> ResultRow | None:
        rows = self.analysis.rows
        return next((r for r in rows if r.cell.arm == arm and r.cell.axis == "base"), None)


def is_copy(arm: str) -> bool:
    """Whether an arm is the second copy of an A/A run; it stands in that table alone."""
    return arm.endswith("-aa")


def draft_label(cell: CellRow) -> str:
    draft = cell.draft
    chance = draft.get("acceptance")
    if isinstance(chance, dict):
        chance = chance.get("synthetic")
    name = phrases.draft_name(str(draft.get("method", "none")), draft.get("k"), chance)
    rows = draft.get("head_rows")
    return f"{name}, head {rows}" if rows else name


def marks_of(row: ResultRow) -> view.Marks:
    marks = row.marks
    return view.Marks(
        weights=marks.weights,
        acceptance=marks.acceptance,
        equality=marks.equality,
        status=marks.status,
    )


def interval_of(span: tuple[float, float] | None) -> view.Interval | None:
    return view.Interval(low=span[0], high=span[1]) if span else None


def _null(reason: str | None) -> view.Measured:
    return view.Measured(reason=reason or "unknown")


def _quantile(cell: CellRow, metric: str, name: str) -> view.Measured:
    found = cell.latencies.get(metric)
    if found is None:
        return view.Measured(reason="not recorded")
    return view.Measured(value=getattr(found, name), reason=found.reasons.get(name))


def _rules(violations: Sequence[Violation], severity: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.rule for v in violations if v.severity == severity))
