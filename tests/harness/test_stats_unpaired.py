"""Two runs without common blocks: hand values, and an independent implementation."""

from __future__ import annotations

import math
import random

import pytest

from finalbench.stats import Verdict, detectable_effect, unpaired


def test_unpaired_by_hand() -> None:
    # means 0.2 and 0.1, variances of the mean 0.0001 / 3 each: error 0.008165, df 4, t 2.776445
    candidate, baseline = [0.19, 0.20, 0.21], [0.09, 0.10, 0.11]
    found = unpaired(candidate, baseline)
    half = 2.7764451051977987 * math.sqrt(2 * 0.0001 / 3)
    assert found.ratio == pytest.approx(math.exp(0.1), rel=1e-12)
    assert found.low == pytest.approx(math.exp(0.1 - half), rel=1e-9)
    assert found.high == pytest.approx(math.exp(0.1 + half), rel=1e-9)
    assert found.verdict is Verdict.FASTER
    assert unpaired(candidate, baseline, higher_is_better=False).verdict is Verdict.SLOWER
    assert unpaired([0.1], baseline).reason == "one block: no interval"
    assert unpaired([0.1, 0.1], [0.1, 0.1]).p_value == 1.0
    assert unpaired([0.2, 0.2], [0.1, 0.1]).p_value == 0.0
    with pytest.raises(ValueError, match="the baseline has no value"):
        unpaired([0.1], [])
    with pytest.raises(ValueError, match="the candidate has no value"):
        unpaired([], [0.1])


def test_unpaired_agrees_with_scipy() -> None:
    from scipy.stats import ttest_ind

    draw = random.Random(9)
    one = [draw.gauss(0.03, 0.02) for _ in range(7)]
    two = [draw.gauss(0.0, 0.05) for _ in range(5)]
    reference = ttest_ind(one, two, equal_var=False)
    interval = reference.confidence_interval(0.95)
    found = unpaired(one, two)
    assert found.p_value == pytest.approx(reference.pvalue, rel=1e-9)
    assert math.log(found.low or 0) == pytest.approx(interval.low, rel=1e-9)
    assert math.log(found.high or 0) == pytest.approx(interval.high, rel=1e-9)


def test_detectable_effect_of_two_runs() -> None:
    candidate, baseline = [0.19, 0.20, 0.21], [0.09, 0.10, 0.11]
    error = math.sqrt(2 * 0.0001 / 3)
    found = unpaired(candidate, baseline)
    assert found.n == (3, 3)
    assert found.detectable == pytest.approx(detectable_effect(error, 1, df=4.0), rel=1e-6)
    wide = unpaired(candidate, baseline, confidence=0.9)
    assert wide.detectable == pytest.approx(
        detectable_effect(error, 1, df=4.0, alpha=0.1), rel=1e-6
    )
    assert wide.low is not None and found.low is not None
    assert wide.low > found.low
    still = unpaired([0.5, 0.5], [0.25, 0.25, 0.25])
    assert (still.low, still.high) == (still.ratio, still.ratio)
    assert still.detectable == 0.0
    lone = unpaired([0.1, 0.2], [0.1])
    assert (lone.low, lone.high, lone.p_value, lone.detectable) == (None,) * 4
    assert lone.verdict is Verdict.INCONCLUSIVE


def test_an_interval_on_both_sides_of_one_is_open() -> None:
    wide, zero = [0.0, 0.1], [0.0, 0.0]
    for candidate, baseline in ((wide, zero), (zero, wide)):
        found = unpaired(candidate, baseline)
        assert found.low is not None and found.high is not None
        assert found.low < 1 < found.high
        assert found.verdict is Verdict.INCONCLUSIVE
