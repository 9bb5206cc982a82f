"""Paired intervals, verdicts, planning and the sources of spread. Pure: numbers in, numbers out.

The unit of replication is a fresh server process; requests inside one process are never counted
as independent runs.
"""

from __future__ import annotations

from finalbench.stats.paired import (
    EQUIVALENCE_MARGIN,
    PairedResult,
    Verdict,
    bootstrap_bca,
    decide,
    paired,
)
from finalbench.stats.planning import (
    blocks_to_see,
    detectable_effect,
    holm,
    planned_blocks,
    power,
)
from finalbench.stats.rolls import Rolls, expected_best_sd, rolls
from finalbench.stats.series import Interval, Trend, mean_interval, trend
from finalbench.stats.spread import Component, Observation, Spread, components
from finalbench.stats.unpaired import UnpairedResult, unpaired

__all__ = [
    "EQUIVALENCE_MARGIN",
    "Component",
    "Interval",
    "Observation",
    "PairedResult",
    "Rolls",
    "Spread",
    "Trend",
    "UnpairedResult",
    "Verdict",
    "blocks_to_see",
    "bootstrap_bca",
    "components",
    "decide",
    "detectable_effect",
    "expected_best_sd",
    "holm",
    "mean_interval",
    "paired",
    "planned_blocks",
    "power",
    "rolls",
    "trend",
    "unpaired",
]
