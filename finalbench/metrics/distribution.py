"""Latency distributions. A percentile below its sample floor is null and says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from finalbench.scenario import Frozen

# Fewest samples at which a 99 % bound of the percentile stays inside the sample (the early-stopping
# floors of MLPerf's endpoint rules).
FLOORS = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99_9": 6636}
_LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}


class Distribution(Frozen):
    """Seconds. `n` is the number of samples, or of tokens where tokens are the weight."""

    n: int
    mean: float | None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_9: float | None = None
    reasons: dict[str, str] = Field(default_factory=dict)


def distribution(
    values: Sequence[float], weights: Sequence[int] | None = None, *, reason: str = "no sample"
) -> Distribution:
    """Nearest-rank percentiles and the mean; with weights, each value counts that many times.

    The floor applies to the number of independent values, not to their weight. Arrays of the
    standard library are taken as they are, so millions of gaps stay small.
    """
    import numpy as np

    if not len(values):
        return Distribution(
            n=0, mean=None, reasons={"mean": reason, **dict.fromkeys(FLOORS, reason)}
        )
    data = np.asarray(values, dtype=np.float64)
    order = np.argsort(data, kind="stable")
    counted = np.ones(len(data), np.int64) if weights is None else np.asarray(weights, np.int64)
    total = int(counted.sum())
    reached = np.cumsum(counted[order])
    found: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name, level in _LEVELS.items():
        if len(values) < FLOORS[name]:
            reasons[name] = f"{len(values)} samples; {name} needs {FLOORS[name]}"
        else:
            # The guard keeps 0.9 x 70 = 63.00000000000001 from asking for the 64th.
            rank = math.ceil(level * total - 1e-9)
            found[name] = float(data[order[int(np.searchsorted(reached, rank))]])
    mean = math.fsum(data * counted) / total
    return Distribution(n=total, mean=mean, reasons=reasons, **found)
