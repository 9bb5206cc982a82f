"""How many blocks, and what they can see. Two-sided tests on the paired log ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping

from finalbench.stats.series import student_quantile

MAX_PLANNED_BLOCKS = 10_000


def power(effect_log: float, sd_log: float, n: int, *, df: float, alpha: float = 0.05) -> float:
    """Chance that `n` paired log ratios of spread `sd_log` show a true `effect_log`."""
    from scipy.special import nctdtr

    if sd_log == 0:
        return 1.0 if effect_log else alpha
    critical = student_quantile(1 - alpha / 2, df)
    shift = abs(effect_log) / sd_log * math.sqrt(n)
    missed = float(nctdtr(df, shift, critical))
    # SciPy gives nan far in the tail, where the chance of a miss is nil.
    return 1.0 if math.isnan(missed) else 1.0 - missed


def planned_blocks(
    effect: float,
    cv: float,
    *,
    correlation: float = 0.0,
    alpha: float = 0.05,
    target_power: float = 0.8,
) -> int:
    """Blocks needed to find a relative `effect` (0.03 = 3 %) when one arm's runs spread by `cv`.

    `correlation` is that of the two arms within a block; pairing removes what they share.
    Six blocks or more spend one degree of freedom on the slot order.
    """
    if cv < 0 or not -1 <= correlation < 1:
        raise ValueError(f"cv {cv}, correlation {correlation}: out of range")
    sd_log = cv * math.sqrt(2 * (1 - correlation))
    return blocks_to_see(effect, sd_log, alpha=alpha, target_power=target_power)


def blocks_to_see(
    effect: float, sd_log: float, *, alpha: float = 0.05, target_power: float = 0.8
) -> int:
    """As `planned_blocks`, from the spread of the paired log ratios themselves."""
    if effect <= 0 or sd_log < 0:
        raise ValueError(f"effect {effect}, spread {sd_log}: out of range")
    for n in range(2, MAX_PLANNED_BLOCKS):
        if power(math.log1p(effect), sd_log, n, df=block_df(n), alpha=alpha) >= target_power:
            return n
    raise ValueError(f"an effect of {effect:.2%} needs more than {MAX_PLANNED_BLOCKS} blocks")


def detectable_effect(
    sd_log: float,
    n: int,
    *,
    df: float | None = None,
    alpha: float = 0.05,
    target_power: float = 0.8,
) -> float:
    """Smallest relative effect found with `target_power`, as a fraction; 0.02 means 2 %."""
    freedom = block_df(n) if df is None else df
    if sd_log == 0:
        return 0.0
    low, high = 0.0, sd_log
    while power(high, sd_log, n, df=freedom, alpha=alpha) < target_power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if power(middle, sd_log, n, df=freedom, alpha=alpha) < target_power:
            low = middle
        else:
            high = middle
    return math.expm1(high)


def block_df(n: int) -> int:
    """Degrees of freedom that `paired` has with balanced order."""
    return n - 2 if n >= 6 else n - 1


def holm(p_values: Mapping[str, float], *, alpha: float = 0.05) -> dict[str, tuple[float, bool]]:
    """Holm's step-down over a family: id -> (adjusted p, rejected at `alpha`)."""
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    adjusted: dict[str, tuple[float, bool]] = {}
    running = 0.0
    for rank, (name, p) in enumerate(ordered):
        if not 0 <= p <= 1:
            raise ValueError(f"{name}: p = {p}")
        running = max(running, min(1.0, (len(ordered) - rank) * p))
        adjusted[name] = (running, running <= alpha)
    return {name: adjusted[name] for name in p_values}
