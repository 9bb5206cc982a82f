"""Two arms measured in the same blocks: log ratio, interval, check by bootstrap, verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist

from finalbench.stats.planning import detectable_effect
from finalbench.stats.series import (
    Trend,
    require_finite,
    student_quantile,
    student_two_sided_p,
    trend,
)

EQUIVALENCE_MARGIN = 0.02
ORDER_ADJUSTMENT_MIN_BLOCKS = 6
BOOTSTRAP_MIN_BLOCKS = 5
BOOTSTRAP_RESAMPLES = 2_000
TREND_MIN_BLOCKS = 6
TREND_ALPHA = 0.01


class Verdict(StrEnum):
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    EQUIVALENT = "EQUIVALENT"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Ratio candidate / baseline. `low`, `high` and `p_value` are None with a reason if unknown.

    `detectable` is the smallest relative effect that this many blocks with this spread would find
    four times out of five. `order_effect` is the ratio that one later slot within a block costs.
    """

    n: int
    ratio: float
    low: float | None
    high: float | None
    p_value: float | None
    sd_log: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    order_effect: float | None
    trend: Trend
    detectable: float | None
    verdict: Verdict
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Fit:
    centre: float
    error: float | None
    df: int
    slope: float | None
    adjusted: list[float]


def paired(
    candidate: Sequence[float],
    baseline: Sequence[float],
    *,
    order: Sequence[float] | None = None,
    confidence: float = 0.95,
    margin: float = EQUIVALENCE_MARGIN,
    higher_is_better: bool = True,
) -> PairedResult:
    """Compare block by block; entry i of both sequences comes from the same block.

    `order` is, per block, the candidate's slot minus the baseline's. With at least six blocks and
    both signs present it enters as a covariate, so that a cost of the first slot or a linear drift
    neither moves the ratio nor widens the interval. FASTER always means better, also for a metric
    where lower values are.

    Raises ValueError when lengths differ, nothing was measured, or a value is not positive.
    """
    logs = _log_ratios(candidate, baseline)
    if order is not None and len(order) != len(logs):
        raise ValueError(f"order has {len(order)} entries for {len(logs)} blocks")
    n = len(logs)
    fit = _fit(logs, order)
    drift = trend(logs)
    base = PairedResult(
        n=n,
        ratio=math.exp(fit.centre),
        low=None,
        high=None,
        p_value=None,
        sd_log=None,
        bootstrap_low=None,
        bootstrap_high=None,
        order_effect=None if fit.slope is None else math.exp(fit.slope),
        trend=drift,
        detectable=None,
        verdict=Verdict.INCONCLUSIVE,
        reason="one block: no interval" if n == 1 else None,
    )
    if fit.error is None:
        return base
    half = student_quantile(0.5 + confidence / 2, fit.df) * fit.error
    low, high = fit.centre - half, fit.centre + half
    boot = bootstrap_bca(fit.adjusted, confidence=confidence) if n >= BOOTSTRAP_MIN_BLOCKS else None
    verdict, reason = decide(low, high, margin=margin, higher_is_better=higher_is_better)
    verdict, reason = _checked(verdict, reason, boot, drift, fit.centre)
    sd = fit.error * math.sqrt(n)
    p_value = student_two_sided_p(fit.centre / fit.error, fit.df) if fit.error else None
    return replace(
        base,
        low=math.exp(low),
        high=math.exp(high),
        p_value=p_value if fit.error else (1.0 if fit.centre == 0 else 0.0),
        sd_log=sd,
        bootstrap_low=None if boot is None else math.exp(boot[0]),
        bootstrap_high=None if boot is None else math.exp(boot[1]),
        detectable=detectable_effect(sd, n, df=fit.df, alpha=1 - confidence),
        verdict=verdict,
        reason=reason,
    )


def decide(
    low: float, high: float, *, margin: float, higher_is_better: bool = True
) -> tuple[Verdict, str | None]:
    """Verdict of an interval of the log ratio. Inside the margin comes first: too small to matter.

    The margin is the same factor on both sides: [1 / (1 + margin), 1 + margin].
    """
    bound = math.log1p(margin)
    if -bound <= low and high <= bound:
        return Verdict.EQUIVALENT, None
    if low > 0:
        return (Verdict.FASTER if higher_is_better else Verdict.SLOWER), None
    if high < 0:
        return (Verdict.SLOWER if higher_is_better else Verdict.FASTER), None
    return Verdict.INCONCLUSIVE, "the interval holds both no change and more than the margin"


def bootstrap_bca(
    values: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = BOOTSTRAP_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval of the mean (Efron 1987)."""
    import numpy as np

    data = np.asarray(values, dtype=float)
    n = data.size
    mean = data.mean()
    if np.ptp(data) == 0:
        return float(mean), float(mean)
    draws = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    means = np.sort(data[draws].mean(axis=1))
    # Ties count half, else a mean that equals many resamples would look biased.
    below = ((means < mean).sum() + 0.5 * (means == mean).sum()) / resamples
    normal = NormalDist()
    bias = normal.inv_cdf(float(below))
    skew = acceleration(values)

    def bound(probability: float) -> float:
        z = bias + normal.inv_cdf(probability)
        level = normal.cdf(bias + z / (1 - skew * z))
        return float(np.quantile(means, level))

    return bound((1 - confidence) / 2), bound((1 + confidence) / 2)


def acceleration(values: Sequence[float]) -> float:
    """Efron's acceleration of the mean. The jackknife's factor 1 / (n - 1) cancels in it."""
    mean = math.fsum(values) / len(values)
    cubes = math.fsum((v - mean) ** 3 for v in values)
    squares = math.fsum((v - mean) ** 2 for v in values)
    return cubes / (6.0 * squares**1.5)


def _log_ratios(candidate: Sequence[float], baseline: Sequence[float]) -> list[float]:
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} candidate blocks against {len(baseline)} of baseline")
    if not candidate:
        raise ValueError("no common block: nothing was compared")
    require_finite(candidate)
    require_finite(baseline)
    logs = []
    for index, (new, old) in enumerate(zip(candidate, baseline, strict=True)):
        if new <= 0 or old <= 0:
            raise ValueError(f"block {index}: {new} against {old}: a rate or time must be positive")
        logs.append(math.log(new / old))
    return logs


def _fit(logs: list[float], order: Sequence[float] | None) -> _Fit:
    """Mean of the log ratios, or the intercept at equal slots where order can be fitted."""
    n = len(logs)
    mean = math.fsum(logs) / n
    balanced = order is not None and min(order) < 0 < max(order)
    if order is None or not balanced or n < ORDER_ADJUSTMENT_MIN_BLOCKS:
        if n == 1:
            return _Fit(mean, None, 0, None, logs)
        variance = math.fsum((v - mean) ** 2 for v in logs) / (n - 1)
        return _Fit(mean, math.sqrt(variance / n), n - 1, None, logs)
    x_mean = math.fsum(order) / n
    sxx = math.fsum((x - x_mean) ** 2 for x in order)
    slope = math.fsum((x - x_mean) * v for x, v in zip(order, logs, strict=True)) / sxx
    adjusted = [v - slope * x for x, v in zip(order, logs, strict=True)]
    centre = mean - slope * x_mean
    variance = math.fsum((v - centre) ** 2 for v in adjusted) / (n - 2)
    return _Fit(centre, math.sqrt(variance * (1 / n + x_mean**2 / sxx)), n - 2, slope, adjusted)


def _checked(
    verdict: Verdict,
    reason: str | None,
    boot: tuple[float, float] | None,
    drift: Trend,
    effect: float,
) -> tuple[Verdict, str | None]:
    """Withdraw a difference that the bootstrap does not see, or that a trend in it outweighs."""
    if verdict not in (Verdict.FASTER, Verdict.SLOWER):
        return verdict, reason
    if boot is not None and boot[0] <= 0 <= boot[1]:
        return Verdict.INCONCLUSIVE, "the bootstrap interval holds no change"
    drifting = (
        drift.n >= TREND_MIN_BLOCKS
        and drift.p_value is not None
        and drift.p_value < TREND_ALPHA
        and abs(drift.total) > abs(effect)
    )
    if drifting:
        return Verdict.INCONCLUSIVE, (
            f"the ratio drifts by {math.expm1(drift.total):+.1%} over the blocks, "
            f"more than the effect of {math.expm1(effect):+.1%}"
        )
    return verdict, reason
