"""What a run found besides its rates: equality, spread, its sources, failures, broken rules."""

from __future__ import annotations

from finalbench.equality import EqualityRow as Judged
from finalbench.report import phrases, view
from finalbench.report.run_view import RunView, draft_label, interval_of, is_copy, marks_of

AXIS_WORDS = {
    "seq_len": "prompt length",
    "output_len": "output length",
    "sampling": "sampling",
    "draft": "draft setting",
    "concurrency": "streams",
    "cache": "prompt cache",
}
SOURCE_WORDS = {
    "process": "fresh process",
    "order": "order in the block",
    "prompt": "prompt",
    "seed": "seed",
    "within": "within a run",
    "residual": "within a run",
}


def equality(run: RunView) -> list[view.EqualityRow]:
    return [_equality(run, row) for row in run.analysis.equality]


def _equality(run: RunView, judged: Judged) -> view.EqualityRow:
    row = run.analysis.row(judged.cell_id)
    cell = row.cell
    arm = run.arm_label(cell.arm)
    versus = f"{arm} drafts on = off" if judged.kind == "drafts" else f"{arm} = stock"
    first = judged.first
    where = None
    if first is not None:
        where = f"prompt {first.prompt_index}, token {first.position}, block {first.block}"
    return view.EqualityRow(
        run_id=run.run_id,
        model=run.model,
        comparison=versus,
        setting=run.setting(cell),
        result=judged.label,
        prompts=judged.prompts,
        positions=judged.positions,
        ties=judged.ties,
        first_divergence=where,
        tie_bound=judged.tie_bound,
        self_rate=judged.self_rate,
        note=judged.reason,
        marks=marks_of(row),
    )


def spread(run: RunView) -> list[view.SpreadRow]:
    rows = [
        view.SpreadRow(
            run_id=run.run_id,
            model=run.model,
            arm=run.arm_label(row.arm),
            source=AXIS_WORDS.get(row.axis, row.axis),
            low_label=_coordinate(run, row.axis, row.low_label),
            low_tok_s=row.low_tok_s,
            high_label=_coordinate(run, row.axis, row.high_label),
            high_tok_s=row.high_tok_s,
            marks=_arm_marks(run, row.arm, row.axis),
        )
        for row in run.analysis.spread
        if not is_copy(row.arm)
    ]
    rows += [row for arm in run.arms() if not is_copy(arm) and (row := _restart(run, arm))]
    order = [run.arm_label(arm) for arm in run.arms()]
    return sorted(rows, key=lambda row: (order.index(row.arm), -row.factor, row.source))


def _restart(run: RunView, arm: str) -> view.SpreadRow | None:
    """The base cell's slowest and fastest fresh process."""
    base = run.base(arm)
    if base is None or not base.valid:
        return None
    blocks = [(v, i) for i, v in enumerate(base.cell.decode_tok_s_blocks) if v]
    if len(blocks) < 2:
        return None
    (low, slow), (high, fast) = min(blocks), max(blocks)
    return view.SpreadRow(
        run_id=run.run_id,
        model=run.model,
        arm=run.arm_label(arm),
        source="fresh process",
        low_label=f"block {slow}",
        low_tok_s=low,
        high_label=f"block {fast}",
        high_tok_s=high,
        marks=marks_of(base),
    )


def _arm_marks(run: RunView, arm: str, axis: str | None = None) -> view.Marks:
    """An arm's classes, over its whole run or one axis: synthetic as soon as one cell is."""
    rows = [row for row in run.analysis.rows if row.cell.arm == arm]
    rows = [row for row in rows if axis is None or row.cell.axis in ("base", axis)] or rows
    if not rows:
        return view.Marks()
    synthetic = any(row.marks.acceptance == "synthetic" for row in rows)
    marks = marks_of(run.base(arm) or rows[0])
    return marks.model_copy(update={"acceptance": "synthetic"}) if synthetic else marks


def _coordinate(run: RunView, axis: str, label: str) -> str:
    if axis == "draft":
        rows = run.analysis.rows
        cell = next((r.cell for r in rows if r.cell.draft_label == label), None)
        return draft_label(cell) if cell else label
    unit = {"seq_len": " tokens", "output_len": " tokens", "concurrency": " streams"}
    return f"{label}{unit.get(axis, '')}"


def variance(run: RunView) -> list[view.VarianceRow]:
    found = []
    for table in run.analysis.variance:
        if is_copy(table.arm):
            continue
        base = run.base(table.arm)
        for part in table.components:
            known = part.share_low is not None and part.share_high is not None
            span = (part.share_low or 0.0, part.share_high or 0.0) if known else None
            found.append(
                view.VarianceRow(
                    run_id=run.run_id,
                    model=run.model,
                    arm=run.arm_label(table.arm),
                    source=SOURCE_WORDS.get(part.source, part.source),
                    share=part.share,
                    interval=interval_of(span),
                    levels=part.levels,
                    marks=marks_of(base) if base else view.Marks(),
                )
            )
    return found


def domains(run: RunView) -> list[view.DomainRow]:
    head = run.analysis.headline
    row = next((r for r in run.analysis.rows if r.cell.id == head.cell_id), None)
    return [
        view.DomainRow(
            run_id=run.run_id,
            model=run.model,
            arm=run.arm_label(head.arm),
            domain=part.domain,
            requests=part.requests,
            decode_tok_s=view.Measured(value=part.decode_tok_s, reason=part.reason),
            against=run.arm_label(head.against or "no baseline"),
            ratio=view.Measured(value=part.ratio, reason=part.reason),
            acceptance_length=part.acceptance_length,
            marks=marks_of(row) if row else view.Marks(),
        )
        for part in run.analysis.domains
    ]


def aa(run: RunView) -> list[view.AaRow]:
    rows = []
    for found in run.analysis.aa:
        cell = run.analysis.row(found.cell_id)
        versus = found.comparison
        rows.append(
            view.AaRow(
                run_id=run.run_id,
                model=run.model,
                arm=run.arm_label(found.arm),
                setting=run.setting(cell.cell),
                ratio=view.Measured(
                    value=versus.ratio,
                    interval=interval_of(versus.ratio_interval),
                    reason=versus.reason,
                ),
                verdict=versus.verdict.value,
                detectable=versus.detectable,
                marks=marks_of(cell),
            )
        )
    return rows


def costs(run: RunView) -> list[view.CostRow]:
    """At the base setting's lengths and sampling; other cells are in the data."""
    rows = []
    for found in run.analysis.draft_costs:
        row = run.analysis.row(found.cell_id)
        base = run.base(row.cell.arm)
        if base is None or is_copy(found.arm) or row.cell.pair_key != base.cell.pair_key:
            continue
        rows.append(
            view.CostRow(
                run_id=run.run_id,
                model=run.model,
                arm=run.arm_label(found.arm),
                setting=draft_label(row.cell),
                acceptance_length=found.acceptance_length,
                cost=found.cost,
                expected_gain=found.expected_gain,
                gain=found.gain,
                marks=marks_of(row),
            )
        )
    return rows


def energy(run: RunView) -> list[view.EnergyRow]:
    """Only where some arm's energy was measured."""
    if all(row.joules is None for row in run.analysis.energy):
        return []
    return [
        view.EnergyRow(
            run_id=run.run_id,
            model=run.model,
            arm=run.arm_label(row.arm),
            seconds=row.seconds,
            joules=row.joules,
            joules_per_token=row.joules_per_token,
            reason=row.reason,
            marks=_arm_marks(run, row.arm),
        )
        for row in run.analysis.energy
    ]


def failures(run: RunView) -> list[view.Failure]:
    return [
        view.Failure(
            run_id=run.run_id,
            cell=run.cell_name(failure.cell_id),
            block=failure.block,
            reason=failure.reason,
        )
        for failure in run.analysis.failures
    ]


def violations(run: RunView) -> list[view.ViolationRow]:
    return [
        view.ViolationRow(
            run_id=run.run_id,
            cell=run.cell_name(found.cell_id),
            rule=found.rule,
            severity=found.severity,
            message=found.message,
            numbers=", ".join(f"{k} {_shown(v)}" for k, v in found.numbers.items()),
        )
        for found in run.analysis.violations
    ]


def _shown(value: float | int | str | None) -> str:
    return phrases.significant(value) if isinstance(value, float) else str(value)
