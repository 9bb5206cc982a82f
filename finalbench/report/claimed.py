"""Claims beside what the rendered runs measured; two columns, never one series."""

from __future__ import annotations

from collections.abc import Sequence

from finalbench.aggregate import Analysis
from finalbench.claims import Claim, Ledger
from finalbench.report import phrases, view


def claim_rows(ledger: Ledger, analyses: Sequence[Analysis]) -> tuple[view.ClaimRow, ...]:
    """One row a claim, in the ledger's order; `measured` names hardware and classes."""
    return tuple(_row(claim, analyses) for claim in ledger.claims)


def _row(claim: Claim, analyses: Sequence[Analysis]) -> view.ClaimRow:
    source = claim.source
    measured = [
        _measured(analysis)
        for analysis in sorted(analyses, key=lambda found: found.run_id)
        if claim.scenario is not None and analysis.scenario == claim.scenario
    ]
    return view.ClaimRow(
        id=claim.id,
        who=source.who,
        model=claim.model,
        claimed=claim.text(),
        hardware=claim.hardware or "not stated",
        status=claim.status,
        measured="; ".join(measured) or None,
        unknown=", ".join(claim.unknown),
        source=f"{source.title}, {source.url}" if source.url else source.title,
    )


def _measured(analysis: Analysis) -> str:
    head = analysis.headline
    marks = view.Marks(weights=head.weights, acceptance=head.acceptance, equality=head.equality)
    where = f"on {analysis.hardware} ({phrases.caution(marks)})"
    if head.ratio is None:
        return f"no ratio: {head.reasons.get('ratio', 'unknown')}, {where}"
    span = (
        view.Interval(low=head.ratio_interval[0], high=head.ratio_interval[1])
        if (head.ratio_interval)
        else None
    )
    return (
        f"{phrases.times(head.ratio)} {phrases.between(span, 'times')} vs {head.against}, {where}"
    )
