"""Token-for-token comparison of arms, from the timed requests and stock's stored scores. Pure."""

from __future__ import annotations

from finalbench.equality.drafts import judge_drafts
from finalbench.equality.judge import judge
from finalbench.equality.rows import (
    Divergence,
    EqualityRow,
    class_of,
    diverges,
    first_difference,
)
from finalbench.equality.stock import TIE_BOUNDS, judge_stock, stock_self_rate, tie_bound

__all__ = [
    "TIE_BOUNDS",
    "Divergence",
    "EqualityRow",
    "class_of",
    "diverges",
    "first_difference",
    "judge",
    "judge_drafts",
    "judge_stock",
    "stock_self_rate",
    "tie_bound",
]
