"""What drafting costs a round: its price by depth, as a fixed part and one for each draft."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Microseconds of a round that drafts k tokens: ``base + fixed + k * slope``, from k = 1 on."""

    base_us: float  # the round without drafts
    fixed_us: float
    slope_us: float
    multiplier: dict[int, float]  # the round at each depth over the one without drafts

    def __str__(self) -> str:
        by_depth = ", ".join(f"k={k} {by:.2f}x" for k, by in sorted(self.multiplier.items()))
        return (
            f"round: {self.base_us:.0f} us + {self.fixed_us:.0f} us with drafts "
            f"+ {self.slope_us:.0f} us a draft; {by_depth} (tokens a round that pay for it)"
        )


def round_costs(step_us: Mapping[int, float]) -> RoundCosts | None:
    """Least squares over the depths measured; None without k = 0 and two depths above it."""
    depths = sorted(k for k in step_us if k > 0)
    if 0 not in step_us or len(depths) < 2:
        return None
    base = step_us[0]
    slope, at_zero = statistics.linear_regression(depths, [step_us[k] for k in depths])
    return RoundCosts(base, at_zero - base, slope, {k: step_us[k] / base for k in depths})
