"""Baseline run and candidate run -> verdict. INCONCLUSIVE is never green."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from finalbench.aggregate import Analysis, ResultRow, analyse
from finalbench.errors import UsageError
from finalbench.gate.ground import changes, is_confounded, refusals
from finalbench.gate.pin import resolve
from finalbench.gate.rows import EXIT_CODES, GateCell, GateResult, Outcome
from finalbench.metrics import metric
from finalbench.report import phrases
from finalbench.report.run_view import marks_of
from finalbench.stats import EQUIVALENCE_MARGIN, UnpairedResult, Verdict, holm, unpaired

Family = Literal["base", "all"]


def gate(
    baseline: Path,
    candidate: Path,
    *,
    margin: float = EQUIVALENCE_MARGIN,
    target: float | None = None,
    family: Family = "base",
    anchor: Path | None = None,
    confirmations: Sequence[Path] = (),
) -> GateResult:
    """Judge two run folders, or a pinned baseline and a run folder.

    `family` says which cells can fail: each arm's base cell, or all of them (Holm over the family).
    With `confirmations`, further candidate runs, a regression stands only if each of them shows it.
    `anchor` is an old release's run: slow drift that each night's baseline hides is tested there.
    Raises UsageError when `target` is set and the gate could not see an effect of that size.
    """
    old, new = analyse(resolve(baseline)), analyse(candidate)
    refused = refusals(old, new)
    if refused:
        return _result("incomparable", refused, old, new, margin)
    found, faults = _cells(old, new, margin)
    gated_ids = {r.cell.id for r in new.rows if family == "all" or r.cell.axis == "base"}
    gated = with_holm([c for c in found if c.cell_id in gated_ids])
    faults = [text for cell_id, text in faults if cell_id in gated_ids]
    if not gated and not faults:
        faults = ["no gated cell is in both runs: nothing was compared"]
    gated = _confirmed(gated, [analyse(path) for path in confirmations], old, margin)
    seen = max((c.detectable for c in gated if c.detectable is not None), default=None)
    if target is not None:
        _require_sight(gated, target)
    anchored, anchor_faults, anchor_run = _anchored(anchor, new, gated_ids, margin)
    moved = changes(old, new)
    outcome, reasons = _outcome(gated, anchored, new, gated_ids, [*faults, *anchor_faults])
    return GateResult(
        outcome=outcome,
        exit_code=EXIT_CODES[outcome],
        reasons=tuple(reasons),
        baseline_run=old.run_id,
        candidate_run=new.run_id,
        margin=margin,
        cells=tuple(gated),
        exploratory=tuple(c for c in found if c.cell_id not in gated_ids),
        anchor_run=anchor_run,
        anchor=tuple(anchored),
        changes=tuple(moved),
        confounded=is_confounded(moved),
        detectable=seen,
    )


def compare_cells(old: ResultRow, new: ResultRow, margin: float) -> GateCell:
    """One cell in two runs, by its blocks."""
    name = new.metric
    better = metric(name).higher_is_better
    direct = unpaired(_logs(new), _logs(old), margin=margin, higher_is_better=better)
    chosen, method = direct, "direct"
    ratios = [[math.log(p.candidate / p.baseline) for p in _pairs(r)] for r in (new, old)]
    if all(ratios):
        chosen = unpaired(ratios[0], ratios[1], margin=margin, higher_is_better=better)
        method = "ratio"
    return GateCell(
        cell_id=new.cell.id,
        label=new.label,
        arm=new.cell.arm,
        metric=name,
        method="ratio" if method == "ratio" else "direct",
        baseline=old.value,
        candidate=new.value,
        ratio=chosen.ratio,
        interval=_interval(chosen),
        direct_ratio=direct.ratio,
        direct_interval=_interval(direct),
        p_value=chosen.p_value,
        verdict=chosen.verdict,
        detectable=chosen.detectable,
        blocks=(chosen.n[1], chosen.n[0]),
        caution=_caution(old, new),
        reason=chosen.reason,
    )


def with_holm(cells: Sequence[GateCell]) -> list[GateCell]:
    """Adjust over the family; a difference that does not survive is INCONCLUSIVE."""
    adjusted = holm({c.cell_id: c.p_value for c in cells if c.p_value is not None})
    out = []
    for cell in cells:
        p, kept = adjusted.get(cell.cell_id, (None, True))
        update: dict[str, object] = {"holm_p": p}
        if not kept and cell.verdict in (Verdict.FASTER, Verdict.SLOWER):
            update |= {
                "verdict": Verdict.INCONCLUSIVE,
                "reason": f"not significant among {len(adjusted)} cells (Holm p = {p:.3g})",
            }
        out.append(cell.model_copy(update=update))
    return out


def _cells(
    old: Analysis, new: Analysis, margin: float
) -> tuple[list[GateCell], list[tuple[str, str]]]:
    """Comparable cells of arms that are no baseline, and what is wrong with the others."""
    before = {r.cell.id: r for r in old.rows}
    copies = {a.twin for a in new.aa}
    found: list[GateCell] = []
    faults: list[tuple[str, str]] = []
    for row in new.rows:
        if not row.comparisons and any(r.comparisons for r in new.rows):
            continue  # the baseline arm itself
        if row.cell.arm in copies:
            continue  # a second copy of an arm, there for the noise floor
        other = before.get(row.cell.id)
        fault = "is not in the baseline run" if other is None else _fault(other, row)
        if fault is not None:
            faults.append((row.cell.id, f"{row.cell.arm} {row.label}: {fault}"))
        elif other is not None:
            found.append(compare_cells(other, row, margin))
    return found, faults


def _fault(old: ResultRow, new: ResultRow) -> str | None:
    for which, row in (("baseline", old), ("candidate", new)):
        broken = [v for v in row.violations if v.severity == "invalid"]
        if broken:
            return f"invalid in the {which}: {broken[0].rule}: {broken[0].message}"
        if not _logs(row):
            return f"no rate in the {which}: {row.cell.reasons.get(row.metric, 'unknown')}"
    return None


def _outcome(
    gated: Sequence[GateCell],
    anchored: Sequence[GateCell],
    new: Analysis,
    gated_ids: set[str],
    faults: Sequence[str],
) -> tuple[Outcome, list[str]]:
    """The worst finding decides; a non-measurement is a failure of its own."""
    diverging = [
        f"{r.cell.arm} {r.label}: {r.marks.equality_reason or 'outputs diverge'}"
        for r in new.rows
        if r.marks.equality == "divergent"
    ]
    if diverging:
        return "divergent", diverging
    slower = [_says(c) for c in gated if c.verdict is Verdict.SLOWER]
    slower += [f"against the anchor: {_says(c)}" for c in anchored if c.verdict is Verdict.SLOWER]
    if slower:
        return "regression", slower
    if faults:
        return "incomparable", list(faults)
    unsure = [_says(c) for c in gated if c.verdict is Verdict.INCONCLUSIVE]
    if unsure:
        return "inconclusive", unsure
    return "pass", [_says(c) for c in gated]


def _says(cell: GateCell) -> str:
    size = "" if cell.ratio is None else f" {cell.ratio - 1:+.1%}"
    if cell.interval is not None:
        size += f" ({cell.interval[0] - 1:+.1%} to {cell.interval[1] - 1:+.1%})"
    seen = "" if cell.detectable is None else f"; detectable {cell.detectable:.1%}"
    why = f"; {cell.reason}" if cell.reason else ""
    return f"{cell.arm} {cell.label}: {cell.verdict}{size}{seen}{why}"


def _confirmed(
    gated: list[GateCell], runs: Sequence[Analysis], old: Analysis, margin: float
) -> list[GateCell]:
    """A trip is confirmed by fresh runs, or withdrawn."""
    for run in runs:
        again = {c.cell_id: c for c in _cells(old, run, margin)[0]}
        for index, cell in enumerate(gated):
            other = again.get(cell.cell_id)
            if cell.verdict is Verdict.SLOWER and (
                other is None or other.verdict is not Verdict.SLOWER
            ):
                reason = f"not confirmed by {run.run_id}"
                gated[index] = cell.model_copy(
                    update={"verdict": Verdict.INCONCLUSIVE, "reason": reason}
                )
    return gated


def _anchored(
    anchor: Path | None, new: Analysis, gated_ids: set[str], margin: float
) -> tuple[list[GateCell], list[str], str | None]:
    if anchor is None:
        return [], [], None
    old = analyse(resolve(anchor))
    refused = refusals(old, new)
    if refused:
        return [], [f"anchor: {text}" for text in refused], old.run_id
    found, faults = _cells(old, new, margin)
    return (
        with_holm([c for c in found if c.cell_id in gated_ids]),
        [f"anchor: {text}" for cell_id, text in faults if cell_id in gated_ids],
        old.run_id,
    )


def _require_sight(gated: Sequence[GateCell], target: float) -> None:
    for cell in gated:
        if cell.detectable is None or cell.detectable > target:
            seen = "nothing" if cell.detectable is None else f"{cell.detectable:.1%} at best"
            raise UsageError(
                f"the gate is to see {target:.1%}, but {cell.arm} {cell.label} can show {seen}",
                hint="measure more blocks, quieter, or set a larger target",
            )


def _result(
    outcome: Outcome, reasons: Sequence[str], old: Analysis, new: Analysis, margin: float
) -> GateResult:
    return GateResult(
        outcome=outcome,
        exit_code=EXIT_CODES[outcome],
        reasons=tuple(reasons),
        baseline_run=old.run_id,
        candidate_run=new.run_id,
        margin=margin,
        changes=tuple(changes(old, new)),
    )


def _logs(row: ResultRow) -> list[float]:
    name = row.metric.removesuffix("_tok_s")
    values = [getattr(block, name).value for block in row.cell.blocks]
    return [math.log(v) for v in values if v is not None and v > 0]


def _pairs(row: ResultRow) -> tuple:
    return () if row.comparison is None else row.comparison.pairs


def _caution(old: ResultRow, new: ResultRow) -> str:
    words = [w for row in (new, old) for w in phrases.caution(marks_of(row)).split(", ") if w]
    return ", ".join(dict.fromkeys(words))


def _interval(result: UnpairedResult) -> tuple[float, float] | None:
    return None if result.low is None or result.high is None else (result.low, result.high)
