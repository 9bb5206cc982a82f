"""Paired comparison: hand values, verdicts, and behaviour on simulated campaigns of known truth."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from finalbench.stats import (
    Verdict,
    bootstrap_bca,
    decide,
    detectable_effect,
    paired,
    planned_blocks,
)
from finalbench.stats.paired import PairedResult


def test_hand_value_of_a_t_interval() -> None:
    # log ratios 0.10, 0.12, 0.14: mean 0.12, sd 0.02, t(0.975, 2) = 4.302653
    result = paired([math.exp(x) for x in (0.10, 0.12, 0.14)], [1.0, 1.0, 1.0])
    half = 4.302652729911275 * 0.02 / math.sqrt(3)
    assert result.ratio == pytest.approx(math.exp(0.12), rel=1e-12)
    assert result.low == pytest.approx(math.exp(0.12 - half), rel=1e-9)
    assert result.high == pytest.approx(math.exp(0.12 + half), rel=1e-9)
    assert result.sd_log == pytest.approx(0.02, rel=1e-9)
    # t = 0.12 / (0.02 / sqrt 3) = 10.3923 with 2 degrees of freedom
    assert result.p_value == pytest.approx(0.009132, rel=1e-3)
    assert result.detectable == pytest.approx(detectable_effect(0.02, 3, df=2), rel=1e-6)
    wide = paired([math.exp(x) for x in (0.10, 0.12, 0.14)], [1.0] * 3, confidence=0.9)
    assert wide.detectable == pytest.approx(detectable_effect(0.02, 3, df=2, alpha=0.1), rel=1e-6)
    assert result.verdict is Verdict.FASTER
    assert result.bootstrap_low is None
    assert result.order_effect is None


def test_order_is_fitted_only_from_six_balanced_blocks() -> None:
    order = [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    noise = [0.001, -0.002, 0.003, 0.001, -0.001, 0.0]
    logs = [0.05 + 0.2 * o + e for o, e in zip(order, noise, strict=True)]
    values = [math.exp(v) for v in logs]
    ones = [1.0] * 6
    fitted = paired(values, ones, order=order)
    plain = paired(values, ones)
    assert fitted.order_effect == pytest.approx(math.exp(0.2), rel=0.01)
    assert fitted.ratio == pytest.approx(math.exp(0.05), rel=0.003)
    assert fitted.high is not None and plain.high is not None
    assert fitted.high - fitted.ratio < (plain.high - plain.ratio) / 20
    assert paired(values[:5], ones[:5], order=order[:5]).order_effect is None
    assert paired(values, ones, order=[1.0] * 6).order_effect is None


def test_unbalanced_order_is_extrapolated_to_equal_slots() -> None:
    order = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 2.0]
    values = [math.exp(0.1 + 0.03 * o) for o in order]
    result = paired(values, [1.0] * 7, order=order)
    assert result.ratio == pytest.approx(math.exp(0.1), rel=1e-9)
    assert result.order_effect == pytest.approx(math.exp(0.03), rel=1e-9)


def test_one_block_has_no_interval_and_no_verdict() -> None:
    result = paired([8.0], [1.0])
    assert result.ratio == pytest.approx(8.0, rel=1e-12)
    assert (result.low, result.high, result.p_value, result.detectable) == (None,) * 4
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reason == "one block: no interval"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.03, 0.08, Verdict.FASTER),
        (-0.08, -0.03, Verdict.SLOWER),
        (-0.01, 0.015, Verdict.EQUIVALENT),
        (0.001, 0.015, Verdict.EQUIVALENT),
        (-0.01, 0.05, Verdict.INCONCLUSIVE),
        (-0.05, 0.01, Verdict.INCONCLUSIVE),
        (0.0, 0.05, Verdict.INCONCLUSIVE),
        (-0.05, 0.0, Verdict.INCONCLUSIVE),
        (-math.log1p(0.02), math.log1p(0.02), Verdict.EQUIVALENT),
    ],
)
def test_verdicts_of_an_interval(low: float, high: float, expected: Verdict) -> None:
    assert decide(low, high, margin=0.02)[0] is expected
    mirrored = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    assert decide(low, high, margin=0.02, higher_is_better=False)[0] is mirrored.get(
        expected, expected
    )


def test_g09_an_improvement_is_faster_for_rates_and_for_times() -> None:
    base = [100.0, 101.0, 99.0, 100.5]
    up, down = [v * 1.5 for v in base], [v * 0.5 for v in base]
    noisy = [1.001, 0.999, 1.002, 1.0]
    up = [v * n for v, n in zip(up, noisy, strict=True)]
    down = [v * n for v, n in zip(down, noisy, strict=True)]
    assert paired(up, base).verdict is Verdict.FASTER
    assert paired(down, base).verdict is Verdict.SLOWER
    assert paired(up, base, higher_is_better=False).verdict is Verdict.SLOWER
    assert paired(down, base, higher_is_better=False).verdict is Verdict.FASTER


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_f08_impossible_values_are_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=r"value 1 is|block 1"):
        paired([1.0, bad], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"value 1 is|block 1"):
        paired([1.0, 1.0], [1.0, bad])


def test_missing_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was compared"):
        paired([], [])
    with pytest.raises(ValueError, match="2 candidate blocks against 1"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="order has 1 entries for 2 blocks"):
        paired([1.0, 2.0], [1.0, 1.0], order=[1.0])


def test_c08_a_warming_arm_is_inconclusive() -> None:
    # Versions that differ only in how warm they are: the ratio decays to 1.
    ratios = [1.30, 1.20, 1.13, 1.08, 1.05, 1.03, 1.02, 1.015]
    result = paired(ratios, [1.0] * 8)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reason is not None and "drifts by" in result.reason
    steady = [1.10, 1.11, 1.09, 1.10, 1.105, 1.095, 1.1, 1.1]
    assert paired(steady, [1.0] * 8).verdict is Verdict.FASTER


def test_bootstrap_that_holds_no_change_withdraws_the_verdict() -> None:
    from finalbench.stats.paired import _checked
    from finalbench.stats.series import trend

    flat = trend([0.1, 0.1, 0.1])
    assert _checked(Verdict.FASTER, None, (-0.01, 0.2), flat, 0.1)[0] is Verdict.INCONCLUSIVE
    assert _checked(Verdict.FASTER, None, (0.01, 0.2), flat, 0.1)[0] is Verdict.FASTER
    assert _checked(Verdict.FASTER, None, (0.0, 0.2), flat, 0.1)[0] is Verdict.INCONCLUSIVE
    assert _checked(Verdict.SLOWER, None, (-0.2, 0.0), flat, -0.1)[0] is Verdict.INCONCLUSIVE
    assert _checked(Verdict.EQUIVALENT, None, (-0.01, 0.2), flat, 0.0)[0] is Verdict.EQUIVALENT


def test_bca_agrees_with_an_independent_implementation() -> None:
    from scipy.stats import bootstrap

    draw = random.Random(3)
    values = [draw.lognormvariate(0, 0.8) for _ in range(25)]
    reference = bootstrap(
        (values,), lambda x, axis: x.mean(axis=axis), n_resamples=60_000, method="BCa", rng=1
    ).confidence_interval
    low, high = bootstrap_bca(values, resamples=60_000)
    assert low == pytest.approx(reference.low, rel=0.012)
    assert high == pytest.approx(reference.high, rel=0.012)


def test_acceleration_by_hand() -> None:
    from finalbench.stats.paired import acceleration

    # Deviations -1, -1, 2: cubes 6, squares 6.
    assert acceleration([0.0, 0.0, 3.0]) == pytest.approx(6 / (6 * 6**1.5), rel=1e-12)
    assert acceleration([1.0, 2.0, 3.0]) == 0.0
    assert acceleration([5.0, 5.0, 2.0]) == pytest.approx(-6 / (6 * 6**1.5), rel=1e-12)


def test_fitted_order_is_a_least_squares_intercept() -> None:
    """Against the textbook matrices, for an order that is neither balanced nor centred."""
    import numpy as np
    from scipy.stats import t as student

    draw = random.Random(8)
    order = [1.0, 1.0, -1.0, 2.0, -2.0, 1.0, 3.0, -1.0]
    logs = [0.08 + 0.03 * o + draw.gauss(0, 0.02) for o in order]
    found = paired([math.exp(v) for v in logs], [1.0] * 8, order=order)
    design = np.column_stack([np.ones(8), order])
    beta, *_ = np.linalg.lstsq(design, np.array(logs), rcond=None)
    residual = np.array(logs) - design @ beta
    covariance = np.linalg.inv(design.T @ design) * (residual @ residual / 6)
    half = student.ppf(0.975, 6) * math.sqrt(covariance[0, 0])
    assert math.log(found.ratio) == pytest.approx(beta[0], rel=1e-9)
    assert math.log(found.order_effect or 0) == pytest.approx(beta[1], rel=1e-9)
    assert math.log(found.low or 0) == pytest.approx(beta[0] - half, rel=1e-9)
    assert math.log(found.high or 0) == pytest.approx(beta[0] + half, rel=1e-9)
    assert found.bootstrap_low is not None and found.bootstrap_high is not None
    adjusted = [v - beta[1] * o for v, o in zip(logs, order, strict=True)]
    assert math.log(found.bootstrap_low) == pytest.approx(bootstrap_bca(adjusted)[0], rel=1e-6)
    assert math.log(found.bootstrap_high) == pytest.approx(bootstrap_bca(adjusted)[1], rel=1e-6)


@pytest.mark.parametrize("order", [[0.0, 1.0] * 3, [0.0, -1.0] * 3, [1.0] * 6, [-1.0] * 6])
def test_an_order_of_one_sign_is_not_fitted(order: list[float]) -> None:
    values = [1.1, 1.12, 1.09, 1.11, 1.10, 1.13]
    assert paired(values, [1.0] * 6, order=order).order_effect is None


def test_bca_counts_ties_by_half() -> None:
    from scipy.stats import bootstrap

    values = [0.0, 0.0, 0.0, 1.0, 1.0, 4.0]
    reference = bootstrap(
        (values,), lambda x, axis: x.mean(axis=axis), n_resamples=50_000, method="BCa", rng=1
    ).confidence_interval
    low, high = bootstrap_bca(values, resamples=50_000)
    assert low == pytest.approx(reference.low, abs=0.1)
    assert high == pytest.approx(reference.high, abs=0.1)


def test_bca_is_reproducible_and_degenerate_data_gives_a_point() -> None:
    assert bootstrap_bca([1.0, 2.0, 4.0]) == bootstrap_bca([1.0, 2.0, 4.0])
    assert bootstrap_bca([2.0, 2.0, 2.0]) == (2.0, 2.0)


def campaign(
    draw: random.Random,
    blocks: int,
    *,
    effect: float = 0.0,
    cv: float = 0.01,
    first_slot_penalty: float = 0.0,
    drift_per_slot: float = 0.0,
) -> PairedResult:
    """Two simulated arms; orders balanced within pairs of blocks and shuffled, as in a plan."""
    orders = [-1, 1] * (blocks // 2) + [-1] * (blocks % 2)
    draw.shuffle(orders)
    mine, theirs = [], []
    for block, order in enumerate(orders):
        for slot in (0, 1):
            candidate = (order < 0) == (slot == 0)
            log = drift_per_slot * (2 * block + slot) + draw.gauss(0.0, cv)
            log -= first_slot_penalty if slot == 0 else 0.0
            log += math.log1p(effect) if candidate else 0.0
            (mine if candidate else theirs).append(100 * math.exp(log))
    return paired(mine, theirs, order=[float(o) for o in orders])


def _tally(count: int, blocks: int, seed: int, **truth: float) -> tuple[Counter[Verdict], float]:
    draw = random.Random(seed)
    found = [campaign(draw, blocks, **truth) for _ in range(count)]
    ratio = 1 + truth.get("effect", 0.0)
    covered = sum(
        r.low is not None and r.high is not None and r.low <= ratio <= r.high for r in found
    )
    return Counter(r.verdict for r in found), covered / count


def test_g01_a_first_slot_penalty_leaves_a_a_equivalent() -> None:
    draw = random.Random(5)
    result = campaign(draw, 12, cv=0.005, first_slot_penalty=0.2)
    assert result.verdict is Verdict.EQUIVALENT
    assert result.order_effect == pytest.approx(math.exp(0.2), rel=0.02)


def test_g02_a_linear_drift_leaves_a_a_equivalent() -> None:
    result = campaign(random.Random(6), 12, cv=0.005, drift_per_slot=0.01)
    assert result.verdict is Verdict.EQUIVALENT
    assert result.ratio == pytest.approx(1.0, abs=0.01)


def test_false_alarms_power_and_coverage_small() -> None:
    """200 campaigns: bounds are those of the full run plus four standard errors."""
    verdicts, coverage = _tally(200, 8, 1, first_slot_penalty=0.2, drift_per_slot=0.01)
    assert verdicts[Verdict.FASTER] + verdicts[Verdict.SLOWER] <= 200 * 0.14
    assert coverage >= 0.88
    verdicts, _ = _tally(200, planned_blocks(0.03, 0.01), 2, effect=0.03)
    assert verdicts[Verdict.FASTER] >= 200 * 0.70


@pytest.mark.nightly
@pytest.mark.parametrize("blocks", [6, 8, 12])
def test_a_a_calls_a_difference_in_at_most_7_percent(blocks: int) -> None:
    verdicts, coverage = _tally(1_000, blocks, blocks, first_slot_penalty=0.2, drift_per_slot=0.01)
    assert verdicts[Verdict.FASTER] + verdicts[Verdict.SLOWER] <= 70
    assert 0.93 <= coverage <= 0.97


@pytest.mark.nightly
def test_planned_size_finds_a_true_effect_in_at_least_80_percent() -> None:
    blocks = planned_blocks(0.03, 0.01)
    verdicts, coverage = _tally(1_000, blocks, 11, effect=0.03)
    assert verdicts[Verdict.FASTER] >= 800
    assert 0.93 <= coverage <= 0.97
    biased, coverage = _tally(
        1_000, max(blocks, 6), 12, effect=0.03, first_slot_penalty=0.2, drift_per_slot=0.01
    )
    assert biased[Verdict.FASTER] >= 800
    assert 0.93 <= coverage <= 0.97


@pytest.mark.nightly
def test_g06_false_alarms_of_plain_noise() -> None:
    verdicts, coverage = _tally(1_000, 5, 13, cv=0.04)
    assert verdicts[Verdict.SLOWER] <= 50
    assert 0.93 <= coverage <= 0.97


def test_the_checks_start_at_their_own_sample_sizes() -> None:
    five = [1.10, 1.12, 1.11, 1.09, 1.105]
    found = paired(five, [1.0] * 5)
    assert found.bootstrap_low is not None and found.bootstrap_high is not None
    assert min(five) < found.bootstrap_low < found.ratio < found.bootstrap_high < max(five)
    assert paired(five[:4], [1.0] * 4).bootstrap_low is None
    falling = [1.40, 1.30, 1.20, 1.12, 1.05, 1.01]
    six = paired(falling, [1.0] * 6)
    assert six.reason is not None and "drifts by" in six.reason
    steep = [1.20, 1.15, 1.10, 1.06, 1.02]
    assert paired(steep, [1.0] * 5).verdict is Verdict.FASTER


def test_a_drift_that_noise_explains_is_no_drift() -> None:
    """Total change above the effect, but p above 0.01: the verdict stands."""
    from finalbench.stats.paired import _checked
    from finalbench.stats.series import Trend

    for p_value, stands in ((0.009, False), (0.01, True), (0.9, True)):
        drift = Trend(slope=0.05, total=0.3, p_value=p_value, n=7)
        verdict, _ = _checked(Verdict.FASTER, None, None, drift, 0.1)
        assert (verdict is Verdict.FASTER) is stands
    equal = Trend(slope=0.05, total=0.1, p_value=0.0, n=7)
    assert _checked(Verdict.FASTER, None, None, equal, 0.1)[0] is Verdict.FASTER
    small = Trend(slope=0.01, total=0.06, p_value=0.0, n=7)
    assert _checked(Verdict.FASTER, None, None, small, 0.1)[0] is Verdict.FASTER
    downwards = Trend(slope=-0.05, total=-0.3, p_value=0.0, n=7)
    verdict, reason = _checked(Verdict.SLOWER, None, None, downwards, -0.1)
    assert verdict is Verdict.INCONCLUSIVE
    assert reason == "the ratio drifts by -25.9% over the blocks, more than the effect of -9.5%"
    few = Trend(slope=0.05, total=0.3, p_value=0.0, n=5)
    assert _checked(Verdict.FASTER, None, None, few, 0.1)[0] is Verdict.FASTER


def test_blocks_without_spread_have_a_certain_p() -> None:
    same = paired([2.0, 4.0, 8.0], [2.0, 4.0, 8.0])
    assert (same.ratio, same.p_value, same.verdict) == (1.0, 1.0, Verdict.EQUIVALENT)
    faster = paired([3.0, 3.0], [2.0, 2.0])
    assert (faster.low, faster.high) == (faster.ratio, faster.ratio)
    assert (faster.p_value, faster.detectable, faster.sd_log) == (0.0, 0.0, 0.0)
    assert faster.verdict is Verdict.FASTER
