"""Every declared attempt at a number, and what picking the best of them would add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from finalbench.stats.series import require_finite, sample_sd


@dataclass(frozen=True, slots=True)
class Rolls:
    """`mean` is what may be quoted; `selection_sd` is what the best of `n` gains by luck alone."""

    n: int
    mean: float
    sd: float | None
    best: float
    selection_sd: float

    @property
    def text(self) -> str:
        spread = "sd unknown" if self.sd is None else f"sd {self.sd:.4g}"
        rolls_word = "roll" if self.n == 1 else "rolls"
        return f"mean {self.mean:.4g} of {self.n} {rolls_word}, {spread}, best {self.best:.4g}"


def rolls(values: Sequence[float], *, higher_is_better: bool = True) -> Rolls:
    """Disclose all rolls of one number, aborted ones excluded by the caller and listed apart."""
    require_finite(values)
    if not values:
        raise ValueError("no roll has a value")
    n = len(values)
    return Rolls(
        n=n,
        mean=math.fsum(values) / n,
        sd=sample_sd(values) if n > 1 else None,
        best=max(values) if higher_is_better else min(values),
        selection_sd=expected_best_sd(n),
    )


def expected_best_sd(n: int) -> float:
    """Expected maximum of `n` independent standard normal draws, by the trapezium rule."""
    if n < 1:
        raise ValueError(f"n = {n}")
    normal = NormalDist()
    step = 0.005
    points = [i * step for i in range(-1_800, 1_801)]
    return math.fsum(x * n * normal.pdf(x) * normal.cdf(x) ** (n - 1) * step for x in points)
