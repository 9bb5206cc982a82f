"""Why drafts gain what they gain: tokens per round against what a round costs."""

from __future__ import annotations

from collections.abc import Sequence

from finalbench.aggregate.compare import compare
from finalbench.aggregate.rows import DraftCost, ResultRow


def draft_costs(rows: Sequence[ResultRow]) -> tuple[DraftCost, ...]:
    """Every valid drafting cell against its undrafted twin of the same arm."""
    plain = {
        (r.cell.arm, r.cell.pair_key): r
        for r in rows
        if r.cell.draft.get("method") == "none" and r.valid and r.cell.decode_tok_s
    }
    found = []
    for row in rows:
        twin = plain.get((row.cell.arm, row.cell.pair_key))
        seconds = row.cell.rates["decode_tok_s"].seconds
        rate, length = row.cell.decode_tok_s, row.cell.acceptance_length
        rounds = row.cell.acceptance.drafts
        if (
            not row.valid
            or twin is None
            or not rounds
            or not seconds
            or rate is None
            or length is None
        ):
            continue
        step_s = 1 / (twin.cell.decode_tok_s or 1.0)
        round_s = seconds / rounds
        gained = compare(row.cell, twin.cell)
        found.append(
            DraftCost(
                arm=row.cell.arm,
                cell_id=row.cell.id,
                label=row.label,
                acceptance_length=length,
                step_s=step_s,
                round_s=round_s,
                cost=round_s / step_s,
                expected_gain=length * step_s / round_s,
                gain=rate * step_s,
                gain_interval=gained.ratio_interval,
                verdict=gained.verdict,
            )
        )
    return tuple(found)
