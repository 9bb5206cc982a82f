"""One series of block values: its interval, and whether it drifts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` and `high` are None with a reason when the sample cannot give an interval."""

    mean: float
    low: float | None
    high: float | None
    n: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """Least-squares slope per step, its total over the series and two-sided p (None: too few)."""

    slope: float
    total: float
    p_value: float | None
    n: int


def student_quantile(probability: float, df: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def student_two_sided_p(t: float, df: float) -> float:
    from scipy.special import stdtr

    return float(2.0 * stdtr(df, -abs(t)))


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Student interval of the mean over fresh processes. One value has no interval."""
    require_finite(values)
    n = len(values)
    if n == 0:
        raise ValueError("no values: a missing measurement is not zero")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1, "one block: no interval")
    sd = sample_sd(values)
    half = student_quantile(0.5 + confidence / 2, n - 1) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def trend(values: Sequence[float]) -> Trend:
    """Slope of `values` over their index; p from Student's t with n - 2 degrees of freedom."""
    require_finite(values)
    n = len(values)
    if n < 2:
        return Trend(0.0, 0.0, None, n)
    centre = (n - 1) / 2
    sxx = math.fsum((i - centre) ** 2 for i in range(n))
    mean = math.fsum(values) / n
    slope = math.fsum((i - centre) * v for i, v in enumerate(values)) / sxx
    total = slope * (n - 1)
    if n < 3:
        return Trend(slope, total, None, n)
    residual = math.fsum((v - mean - slope * (i - centre)) ** 2 for i, v in enumerate(values))
    error = math.sqrt(residual / (n - 2) / sxx)
    if error == 0.0:
        return Trend(slope, total, 0.0 if slope else 1.0, n)
    return Trend(slope, total, student_two_sided_p(slope / error, n - 2), n)


def sample_sd(values: Sequence[float]) -> float:
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))


def require_finite(values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"value {index} is {value}: not a measurement")
