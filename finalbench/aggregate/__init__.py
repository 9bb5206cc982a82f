"""Records -> table -> leaderboard. Pure: reads a run folder, writes nothing."""

from __future__ import annotations

from finalbench.aggregate.analysis import analyse, baseline_arms, twins
from finalbench.aggregate.board import leaderboard
from finalbench.aggregate.compare import compare
from finalbench.aggregate.rows import (
    AaRow,
    Analysis,
    BareComparison,
    Board,
    BoardRow,
    Comparison,
    DomainSplit,
    DraftCost,
    EnergyRow,
    Headline,
    Marks,
    Pair,
    ResultRow,
    SpreadRow,
    Status,
    VarianceTable,
)
from finalbench.aggregate.sizing import SampleSize, sample_size
from finalbench.aggregate.summary import summary

__all__ = [
    "AaRow",
    "Analysis",
    "BareComparison",
    "Board",
    "BoardRow",
    "Comparison",
    "DomainSplit",
    "DraftCost",
    "EnergyRow",
    "Headline",
    "Marks",
    "Pair",
    "ResultRow",
    "SampleSize",
    "SpreadRow",
    "Status",
    "VarianceTable",
    "analyse",
    "baseline_arms",
    "compare",
    "leaderboard",
    "sample_size",
    "summary",
    "twins",
]
