"""Cells against their baselines, paired by block."""

from __future__ import annotations

from collections.abc import Sequence

from finalbench.aggregate.rows import Comparison, Pair
from finalbench.metrics import CellRow, metric
from finalbench.stats import EQUIVALENCE_MARGIN, Verdict, holm, paired
from finalbench.validity import Violation

Blocks = dict[int, tuple[float, int | None]]  # block -> (value, slot of its server)


def metric_of(cell: CellRow) -> str:
    return "decode_tok_s" if cell.concurrency == 1 else "steady_tok_s"


def block_values(cell: CellRow, metric_id: str) -> Blocks:
    name = metric_id.removesuffix("_tok_s")
    found: Blocks = {}
    for block in cell.blocks:
        value = getattr(block, name).value
        if value is not None:
            found[block.block] = (value, block.order_index)
    return found


def compare(
    candidate: CellRow,
    baseline: CellRow,
    violations: Sequence[Violation] = (),
    *,
    margin: float = EQUIVALENCE_MARGIN,
) -> Comparison:
    """Pair the blocks both cells have. An invalid side leaves the ratio null, with the reason."""
    metric_id = metric_of(candidate)
    base = Comparison(
        metric=metric_id,
        against=baseline.arm,
        against_cell=baseline.id,
        value=candidate.rates[metric_id].value,
        against_value=baseline.rates[metric_id].value,
    )
    refusal = _refusal(candidate, baseline, violations)
    mine, theirs = block_values(candidate, metric_id), block_values(baseline, metric_id)
    common = sorted(set(mine) & set(theirs))
    if refusal is None and not common:
        refusal = _unmeasured((candidate, mine), (baseline, theirs), metric_id)
    if refusal is not None:
        return base.model_copy(update={"reason": refusal})
    pairs = tuple(_pair(b, mine[b], theirs[b]) for b in common)
    slots = [p.slots for p in pairs if p.slots is not None]
    result = paired(
        [p.candidate for p in pairs],
        [p.baseline for p in pairs],
        order=slots if len(slots) == len(pairs) else None,
        margin=margin,
        higher_is_better=metric(metric_id).higher_is_better,
    )
    return base.model_copy(
        update={
            "ratio": result.ratio,
            "ratio_interval": _both(result.low, result.high),
            "bootstrap_interval": _both(result.bootstrap_low, result.bootstrap_high),
            "p_value": result.p_value,
            "verdict": result.verdict,
            "detectable": result.detectable,
            "order_effect": result.order_effect,
            "trend_total": result.trend.total,
            "pairs": pairs,
            "reason": result.reason,
        }
    )


def with_holm(comparisons: dict[str, Comparison]) -> dict[str, Comparison]:
    """Adjusted p over one family of cells; a difference that does not survive is withdrawn."""
    known = {name: c.p_value for name, c in comparisons.items() if c.p_value is not None}
    adjusted = holm(known)
    out: dict[str, Comparison] = {}
    for name, comparison in comparisons.items():
        if name not in adjusted:
            out[name] = comparison
            continue
        p, kept = adjusted[name]
        update: dict[str, object] = {"holm_p": p}
        if not kept and comparison.verdict in (Verdict.FASTER, Verdict.SLOWER):
            update |= {
                "verdict": Verdict.INCONCLUSIVE,
                "reason": f"not significant among {len(known)} cells (Holm p = {p:.3g})",
            }
        out[name] = comparison.model_copy(update=update)
    return out


def _unmeasured(
    candidate: tuple[CellRow, Blocks], baseline: tuple[CellRow, Blocks], metric_id: str
) -> str:
    """Why no block has both arms."""
    for cell, blocks in (candidate, baseline):
        if not blocks:
            return f"{cell.arm} has no {metric_id}: {cell.reasons.get(metric_id, 'unknown')}"
    return "no block has both arms"


def _refusal(candidate: CellRow, baseline: CellRow, violations: Sequence[Violation]) -> str | None:
    for cell in (candidate, baseline):
        for found in violations:
            if found.cell_id in (cell.id, None) and found.severity == "invalid":
                return f"{cell.arm} cell is invalid: {found.rule}"
    if candidate.text_class != baseline.text_class:
        return f"text classes differ: {candidate.text_class} against {baseline.text_class}"
    if candidate.token_source != baseline.token_source and None not in (
        candidate.token_source,
        baseline.token_source,
    ):
        return f"token sources differ: {candidate.token_source} against {baseline.token_source}"
    return None


def _pair(block: int, mine: tuple[float, int | None], theirs: tuple[float, int | None]) -> Pair:
    slots = None if mine[1] is None or theirs[1] is None else float(mine[1] - theirs[1])
    return Pair(block=block, candidate=mine[0], baseline=theirs[0], slots=slots)


def _both(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)
