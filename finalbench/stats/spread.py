"""Where the spread of a number comes from: variance components of crossed and nested factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

WITHIN = "within"


@dataclass(frozen=True, slots=True)
class Observation:
    """One log rate with the level of every factor, e.g. {"process": "b0-vk", "prompt": "7"}."""

    value: float
    levels: Mapping[str, str]
    block: str


@dataclass(frozen=True, slots=True)
class Component:
    """Variance of one source; `share` of the total with a jackknife interval over blocks."""

    source: str
    variance: float
    share: float
    share_low: float | None
    share_high: float | None
    levels: int


@dataclass(frozen=True, slots=True)
class Spread:
    components: tuple[Component, ...]
    total_variance: float
    observations: int
    reason: str | None


def components(observations: Sequence[Observation], factors: Sequence[str]) -> Spread:
    """Split the variance of log values among `factors` and what remains within one run.

    Henderson's moment equations for a general random model, y = mean + sum of Z_i u_i + e: the
    quadratic forms ||Z_i' M y||^2 equal their expectations, M removing the mean. Estimates are
    unbiased and may be negative; shares are taken after cutting at zero. A factor that has a
    single level, or whose levels coincide with another's, cannot be told apart and is named.
    """
    usable, reason = _separable(observations, factors)
    if len(observations) < 3:
        return Spread((), 0.0, len(observations), "fewer than three observations")
    estimates = _moments(observations, usable)
    if estimates is None:
        return Spread((), 0.0, len(observations), "the design cannot separate the sources")
    bounds = _jackknife(observations, usable)
    total = sum(max(v, 0.0) for v in estimates.values())
    rows = []
    for source, variance in estimates.items():
        share = max(variance, 0.0) / total if total else 0.0
        low, high = bounds.get(source, (None, None))
        levels = (
            len(observations) if source == WITHIN else len({o.levels[source] for o in observations})
        )
        rows.append(Component(source, variance, share, low, high, levels))
    return Spread(tuple(rows), total, len(observations), reason)


def _separable(
    observations: Sequence[Observation], factors: Sequence[str]
) -> tuple[list[str], str | None]:
    kept: list[str] = []
    partitions: dict[tuple[int, ...], str] = {}
    dropped: list[str] = []
    for factor in factors:
        codes: dict[str, int] = {}
        partition = tuple(codes.setdefault(o.levels[factor], len(codes)) for o in observations)
        if len(codes) < 2:
            dropped.append(f"{factor} (one level)")
        elif len(codes) == len(observations):
            dropped.append(f"{factor} (a level per observation: part of {WITHIN})")
        elif partition in partitions:
            dropped.append(f"{factor} (same levels as {partitions[partition]})")
        else:
            partitions[partition] = factor
            kept.append(factor)
    return kept, f"not separable: {', '.join(dropped)}" if dropped else None


def _moments(
    observations: Sequence[Observation], factors: Sequence[str]
) -> dict[str, float] | None:
    import numpy as np

    y = np.array([o.value for o in observations], dtype=float)
    n = y.size
    residual = y - y.mean()
    designs = [_one_hot(observations, factor) for factor in factors]
    # Column means removed once: M Z_i. The within-run term has Z = identity.
    centred = [z - z.mean(axis=0) for z in designs]
    size = len(factors) + 1
    left = np.zeros((size, size))
    right = np.zeros(size)
    for i, z in enumerate(designs):
        right[i] = float(((z.T @ residual) ** 2).sum())
        for j in range(i, len(designs)):
            left[i, j] = left[j, i] = float(((z.T @ centred[j]) ** 2).sum())
        left[i, -1] = left[-1, i] = float((centred[i] ** 2).sum())
    left[-1, -1] = n - 1
    right[-1] = float((residual**2).sum())
    if np.linalg.matrix_rank(left) < size:
        return None
    solution = np.linalg.solve(left, right)
    return dict(zip([*factors, WITHIN], map(float, solution), strict=True))


def _one_hot(observations: Sequence[Observation], factor: str) -> np.ndarray:
    import numpy as np

    codes: dict[str, int] = {}
    index = [codes.setdefault(o.levels[factor], len(codes)) for o in observations]
    matrix = np.zeros((len(index), len(codes)))
    matrix[np.arange(len(index)), index] = 1.0
    return matrix


def _jackknife(
    observations: Sequence[Observation], factors: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Leave one block out; interval of each share, cut to [0, 1]. Empty below three blocks."""
    blocks = sorted({o.block for o in observations})
    if len(blocks) < 3:
        return {}
    shares: dict[str, list[float]] = {}
    for left_out in blocks:
        estimates = _moments([o for o in observations if o.block != left_out], factors)
        if estimates is None:
            return {}
        total = sum(max(v, 0.0) for v in estimates.values())
        for source, variance in estimates.items():
            shares.setdefault(source, []).append(max(variance, 0.0) / total if total else 0.0)
    n = len(blocks)
    bounds = {}
    for source, values in shares.items():
        mean = math.fsum(values) / n
        error = math.sqrt((n - 1) / n * math.fsum((v - mean) ** 2 for v in values))
        bounds[source] = (max(0.0, mean - 1.96 * error), min(1.0, mean + 1.96 * error))
    return bounds
