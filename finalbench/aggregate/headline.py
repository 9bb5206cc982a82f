"""The one line of a run: the base cell, declared before anything was measured, never the best."""

from __future__ import annotations

from collections.abc import Sequence

from finalbench.aggregate.rows import DomainSplit, Headline, ResultRow
from finalbench.record import Run
from finalbench.stats import Verdict


def base_cell(rows: Sequence[ResultRow], arm: str) -> ResultRow | None:
    return next((r for r in rows if r.cell.arm == arm and r.cell.axis == "base"), None)


def headline(
    rows: Sequence[ResultRow], *, model: str, baselines: Sequence[str], run: Run
) -> Headline:
    """Of several baselines the faster counts, so the ratio is the smaller one."""
    arms = [a for a in run.scenario.arms if a not in baselines] or list(run.scenario.arms)
    arm = arms[0]
    row = base_cell(rows, arm)
    if row is None:
        return _empty(model, arm, run, "the plan has no base cell for this arm")
    comparison = row.comparison
    reasons: dict[str, str] = {}
    value = row.cell.decode_tok_s if row.valid else None
    if value is None:
        reasons["decode_tok_s"] = _why(row, "decode_tok_s")
    ratio = comparison.ratio if comparison is not None else None
    if ratio is None:
        reasons["ratio"] = (
            "no baseline in this run"
            if comparison is None
            else comparison.reason or "the baseline has no value"
        )
    elif comparison is not None and comparison.ratio_interval is None:
        reasons["ratio_interval"] = comparison.reason or "unknown"
    if comparison is not None and comparison.reason and ratio is not None:
        reasons["verdict"] = comparison.reason
    for name in ("acceptance_length", "bandwidth_share"):
        if getattr(row.cell, name) is None:
            reasons[name] = row.cell.reasons.get(name, "unknown")
    if row.marks.equality_reason:
        reasons["equality"] = row.marks.equality_reason
    return Headline(
        model=model,
        arm=arm,
        cell_id=row.cell.id,
        setting=row.label,
        against=None if comparison is None else comparison.against,
        decode_tok_s=value,
        against_decode_tok_s=None if comparison is None else comparison.against_value,
        ratio=ratio,
        ratio_interval=None if comparison is None else comparison.ratio_interval,
        verdict=Verdict.INCONCLUSIVE if comparison is None else comparison.verdict,
        equality=row.marks.equality,
        acceptance_length=row.cell.acceptance_length,
        bandwidth_share=row.cell.bandwidth_share,
        weights=row.marks.weights,
        acceptance=row.marks.acceptance,
        blocks=0 if comparison is None else len(comparison.pairs),
        detectable=None if comparison is None else comparison.detectable,
        reasons=reasons,
    )


def domain_split(rows: Sequence[ResultRow], baselines: Sequence[str]) -> tuple[DomainSplit, ...]:
    """The base cell of every arm that is no baseline, by domain, against the baseline's."""
    found: list[DomainSplit] = []
    own = next((r for r in rows if r.cell.axis == "base" and r.cell.arm not in baselines), None)
    if own is None:
        return ()
    comparison = own.comparison
    other = next(
        (r for r in rows if comparison is not None and r.cell.id == comparison.against_cell), None
    )
    theirs = {} if other is None else {d.domain: d.decode_tok_s for d in other.cell.domains}
    for mine in own.cell.domains:
        against = theirs.get(mine.domain)
        known = mine.decode_tok_s is not None and against is not None
        found.append(
            DomainSplit(
                domain=mine.domain,
                requests=mine.requests,
                decode_tok_s=mine.decode_tok_s,
                against_decode_tok_s=against,
                ratio=mine.decode_tok_s / against
                if mine.decode_tok_s is not None and against is not None
                else None,
                acceptance_length=mine.acceptance_length,
                reason=None if known else mine.reason or "the baseline has no value",
            )
        )
    return tuple(found)


def _why(row: ResultRow, field: str) -> str:
    invalid = [v for v in row.violations if v.severity == "invalid"]
    if invalid:
        return f"invalid: {invalid[0].rule}: {invalid[0].message}"
    return row.cell.reasons.get(field, "unknown")


def _empty(model: str, arm: str, run: Run, reason: str) -> Headline:
    return Headline(
        model=model,
        arm=arm,
        cell_id=None,
        setting=None,
        against=run.scenario.baseline,
        decode_tok_s=None,
        against_decode_tok_s=None,
        ratio=None,
        ratio_interval=None,
        verdict=Verdict.INCONCLUSIVE,
        equality="not_judged",
        acceptance_length=None,
        bandwidth_share=None,
        weights=run.classes.weights,
        acceptance=run.classes.acceptance,
        reasons={"decode_tok_s": reason},
    )
