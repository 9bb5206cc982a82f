"""Two runs that share no block: Welch's interval of the log ratio, with the same verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finalbench.stats.paired import EQUIVALENCE_MARGIN, Verdict, decide
from finalbench.stats.planning import detectable_effect
from finalbench.stats.series import require_finite, student_quantile, student_two_sided_p


@dataclass(frozen=True, slots=True)
class UnpairedResult:
    """Ratio candidate / baseline of geometric means; null values have a reason."""

    n: tuple[int, int]
    ratio: float
    low: float | None
    high: float | None
    p_value: float | None
    detectable: float | None
    verdict: Verdict
    reason: str | None


def unpaired(
    candidate_logs: Sequence[float],
    baseline_logs: Sequence[float],
    *,
    confidence: float = 0.95,
    margin: float = EQUIVALENCE_MARGIN,
    higher_is_better: bool = True,
) -> UnpairedResult:
    """Compare logs of block values of two runs. ValueError when either is empty or not finite."""
    for name, values in (("candidate", candidate_logs), ("baseline", baseline_logs)):
        require_finite(values)
        if not values:
            raise ValueError(f"the {name} has no value: nothing was measured")
    sizes = (len(candidate_logs), len(baseline_logs))
    centre = _mean(candidate_logs) - _mean(baseline_logs)
    if min(sizes) < 2:
        return UnpairedResult(
            sizes,
            math.exp(centre),
            None,
            None,
            None,
            None,
            Verdict.INCONCLUSIVE,
            "one block: no interval",
        )
    parts = [_squared_error(candidate_logs), _squared_error(baseline_logs)]
    error = math.sqrt(sum(parts))
    spent = sum(p**2 / (n - 1) for p, n in zip(parts, sizes, strict=True))
    df = sum(parts) ** 2 / spent if spent else float(sum(sizes) - 2)
    half = student_quantile(0.5 + confidence / 2, df) * error
    verdict, reason = decide(
        centre - half, centre + half, margin=margin, higher_is_better=higher_is_better
    )
    p_value = student_two_sided_p(centre / error, df) if error else float(centre == 0)
    return UnpairedResult(
        n=sizes,
        ratio=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half),
        p_value=p_value,
        detectable=detectable_effect(error, 1, df=df, alpha=1 - confidence),
        verdict=verdict,
        reason=reason,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _squared_error(values: Sequence[float]) -> float:
    """Estimated variance of the mean."""
    mean, n = _mean(values), len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n
