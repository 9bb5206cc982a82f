"""Sample sizes, detectable effects, Holm, rolls, trends and variance components."""

from __future__ import annotations

import math
import random
from statistics import variance

import pytest
from scipy.special import nctdtr

from finalbench.stats import (
    Observation,
    blocks_to_see,
    components,
    detectable_effect,
    expected_best_sd,
    holm,
    mean_interval,
    planned_blocks,
    power,
    rolls,
    trend,
)
from finalbench.stats.planning import block_df
from finalbench.stats.series import student_quantile


@pytest.mark.parametrize(
    ("effect", "blocks"), [(0.01, 22), (0.02, 8), (0.03, 5), (0.05, 4), (0.10, 3)]
)
def test_planned_blocks_at_cv_2_percent_with_correlated_arms(effect: float, blocks: int) -> None:
    """About the published 21 / 7 / 5 / 4 / 2 pairs; the slot order costs a degree of freedom."""
    assert planned_blocks(effect, 0.02, correlation=0.7) == blocks


def test_power_meets_simulation() -> None:
    draw = random.Random(1)
    n, sd, effect = 6, 0.02, 0.025
    hits = 0
    for _ in range(4_000):
        values = [draw.gauss(effect, sd) for _ in range(n)]
        interval = mean_interval(values)
        assert interval.low is not None and interval.high is not None
        hits += interval.low > 0 or interval.high < 0
    assert power(effect, sd, n, df=n - 1) == pytest.approx(hits / 4_000, abs=0.03)


def test_detectable_effect_is_where_power_is_80_percent() -> None:
    effect = detectable_effect(0.02, 8)
    assert power(math.log1p(effect), 0.02, 8, df=6) == pytest.approx(0.8, abs=1e-6)
    assert detectable_effect(0.02, 8, df=7) < effect
    assert detectable_effect(0.0, 4) == 0.0
    assert detectable_effect(0.04, 8) > 1.9 * effect


def test_g07_ten_percent_noise_and_few_runs_cannot_see_five_percent() -> None:
    assert detectable_effect(0.10 * math.sqrt(2), 3) > 0.05
    assert planned_blocks(0.05, 0.10) > 50


def test_planning_refuses_nonsense() -> None:
    for effect, cv, correlation in ((0.0, 0.1, 0.0), (0.1, -0.1, 0.0), (0.1, 0.1, 1.0)):
        with pytest.raises(ValueError, match="out of range"):
            planned_blocks(effect, cv, correlation=correlation)
    with pytest.raises(ValueError, match="needs more than"):
        planned_blocks(1e-6, 1.0)
    with pytest.raises(ValueError, match="out of range"):
        planned_blocks(0.03, 0.01, correlation=-1.5)
    assert planned_blocks(0.03, 0.01, correlation=-1.0) > planned_blocks(0.03, 0.01)
    assert planned_blocks(0.01, 0.0) == 2


def test_power_at_its_ends() -> None:
    assert power(0.1, 0.0, 3, df=2) == 1.0
    assert power(0.0, 0.0, 3, df=2) == 0.05
    assert power(0.0, 0.0, 3, df=2, alpha=0.1) == 0.1
    assert power(50.0, 1e-3, 100, df=98) == 1.0


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 -> 0.04, 0.06, 0.06, 0.06
    found = holm({"a": 0.03, "b": 0.01, "c": 0.04, "d": 0.02})
    assert found["b"] == (pytest.approx(0.04), True)
    assert found["d"] == (pytest.approx(0.06), False)
    assert found["a"] == (pytest.approx(0.06), False)
    assert found["c"] == (pytest.approx(0.06), False)
    assert list(found) == ["a", "b", "c", "d"]
    assert holm({"a": 0.05}) == {"a": (0.05, True)}
    assert holm({"a": 0.9, "b": 0.8}) == {"a": (1.0, False), "b": (1.0, False)}
    assert holm({}) == {}
    with pytest.raises(ValueError, match=r"a: p = 1\.5"):
        holm({"a": 1.5})
    with pytest.raises(ValueError, match=r"a: p = -0\.5"):
        holm({"a": -0.5})


@pytest.mark.parametrize(
    ("n", "sd"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (5, 1.1630), (10, 1.5388), (60, 2.3193)]
)
def test_expected_gain_of_picking_the_best(n: int, sd: float) -> None:
    assert expected_best_sd(n) == pytest.approx(sd, abs=2e-4)


def test_rolls_disclose_the_mean_and_the_luck() -> None:
    found = rolls([500.0, 510.0, 505.0])
    assert (found.n, found.mean, found.best) == (3, 505.0, 510.0)
    assert found.sd == pytest.approx(5.0)
    assert found.text == "mean 505 of 3 rolls, sd 5, best 510"
    assert rolls([2.0, 1.0], higher_is_better=False).best == 1.0
    one = rolls([7.0])
    assert one.sd is None
    assert one.text == "mean 7 of 1 roll, sd unknown, best 7"
    with pytest.raises(ValueError, match="no roll"):
        rolls([])
    with pytest.raises(ValueError, match="n = 0"):
        expected_best_sd(0)


def test_mean_interval_by_hand() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - half, rel=1e-9)
    assert found.high == pytest.approx(2 + half, rel=1e-9)
    alone = mean_interval([5.0])
    assert (alone.low, alone.high, alone.reason) == (None, None, "one block: no interval")
    with pytest.raises(ValueError, match="missing measurement is not zero"):
        mean_interval([])
    with pytest.raises(ValueError, match="value 1 is nan"):
        mean_interval([1.0, math.nan])


def test_trend_by_hand() -> None:
    found = trend([1.0, 2.0, 3.0, 4.0])
    assert (found.slope, found.total, found.p_value) == (1.0, 3.0, 0.0)
    flat = trend([2.0, 2.0, 2.0])
    assert (flat.slope, flat.p_value) == (0.0, 1.0)
    assert trend([1.0, 3.0]).p_value is None
    assert trend([1.0]).total == 0.0
    # slope 0.8, residual ss 1.8 over 2 df, sxx 5: t = 0.8 / sqrt(0.9 / 5) = 1.8856, p = 0.2
    noisy = trend([1.0, 3.0, 2.0, 4.0])
    assert noisy.slope == pytest.approx(0.8)
    assert noisy.p_value == pytest.approx(0.2, abs=1e-3)


SD = 0.01 * math.sqrt(2)
FACTORS = ["process", "prompt"]
TRUE = {"process": 4e-4, "order": 0.0, "prompt": 9e-4, "within": 1e-4}


def simulated(draw: random.Random, blocks: int = 12, prompts: int = 16) -> list[Observation]:
    """Crossed prompts and processes; the slot alternates and has a random effect of its own."""
    per_prompt = [draw.gauss(0, math.sqrt(TRUE["prompt"])) for _ in range(prompts)]
    found = []
    for block in range(blocks):
        process = draw.gauss(0, math.sqrt(TRUE["process"]))
        for prompt in range(prompts):
            value = process + per_prompt[prompt] + draw.gauss(0, math.sqrt(TRUE["within"]))
            levels = {"process": str(block), "order": str(block % 2), "prompt": str(prompt)}
            found.append(Observation(value, levels, str(block)))
    return found


def _campaign_means(count: int) -> dict[str, float]:
    draw = random.Random(7)
    sums = dict.fromkeys(TRUE, 0.0)
    for _ in range(count):
        result = components(simulated(draw), ["process", "order", "prompt"])
        for part in result.components:
            sums[part.source] += part.variance / count
    return sums


def test_components_are_recovered_in_the_mean() -> None:
    means = _campaign_means(60)
    assert means["process"] == pytest.approx(TRUE["process"], rel=0.25)
    assert means["prompt"] == pytest.approx(TRUE["prompt"], rel=0.25)
    assert means["within"] == pytest.approx(TRUE["within"], rel=0.1)
    assert abs(means["order"]) < 5e-5


@pytest.mark.nightly
def test_components_within_20_percent_over_many_campaigns() -> None:
    means = _campaign_means(400)
    for source in ("process", "prompt", "within"):
        assert means[source] == pytest.approx(TRUE[source], rel=0.2)


def test_components_state_shares_with_intervals() -> None:
    result = components(simulated(random.Random(1)), ["process", "prompt"])
    assert [c.source for c in result.components] == ["process", "prompt", "within"]
    assert sum(c.share for c in result.components) == pytest.approx(1.0)
    for part in result.components:
        assert part.share_low is not None and part.share_high is not None
        assert 0 <= part.share_low <= part.share_high <= 1
    assert [c.levels for c in result.components] == [12, 16, 192]
    assert result.reason is None


def test_components_name_what_they_cannot_separate() -> None:
    found = [
        Observation(o.value, {**o.levels, "seed": o.levels["prompt"], "host": "a"}, o.block)
        for o in simulated(random.Random(2), blocks=4, prompts=4)
    ]
    result = components(found, ["process", "prompt", "seed", "host"])
    assert result.reason == "not separable: seed (same levels as prompt), host (one level)"
    assert [c.source for c in result.components] == ["process", "prompt", "within"]
    few = components(found[:2], ["process"])
    assert few.reason == "fewer than three observations"
    every = [Observation(o.value, {"id": str(i)}, o.block) for i, o in enumerate(found)]
    assert components(every, ["id"]).reason == (
        "not separable: id (a level per observation: part of within)"
    )


def test_planning_at_its_edges() -> None:
    assert blocks_to_see(0.03, 0.02 * math.sqrt(2)) == planned_blocks(0.03, 0.02) == 10
    # Exactly the wanted power is enough.
    assert planned_blocks(0.02, 0.01, target_power=power(math.log1p(0.02), SD, 5, df=4)) == 5
    # From six blocks on, the slot order costs a degree of freedom.
    assert [block_df(n) for n in (2, 5, 6, 7)] == [1, 4, 4, 5]
    # Far in the tail SciPy gives nan, where the chance of a miss is nil.
    assert math.isnan(nctdtr(9, 40.0, student_quantile(0.975, 9)))
    assert power(40.0 / math.sqrt(10), 1.0, 10, df=9) == 1.0
    assert holm({"a": 0.0, "b": 1.0}) == {"a": (0.0, True), "b": (1.0, False)}
    assert rolls([1.0, 3.0]).sd == pytest.approx(math.sqrt(2))


def test_short_series() -> None:
    assert mean_interval([5.0]).n == 1
    one = trend([4.0])
    assert (one.slope, one.total, one.p_value, one.n) == (0.0, 0.0, None, 1)
    two = trend([4.0, 7.0])
    assert (two.slope, two.total, two.p_value, two.n) == (3.0, 3.0, None, 2)


def crossed(values: list[list[float]]) -> list[Observation]:
    """One block a row, one prompt a column."""
    return [
        Observation(value, {"process": f"b{i}", "prompt": str(j)}, f"b{i}")
        for i, row in enumerate(values)
        for j, value in enumerate(row)
    ]


TWO_WAY = [[1.0, 2.0, 4.0], [2.0, 2.5, 6.0], [1.5, 3.5, 4.5]]


def test_components_of_a_two_way_table_by_hand() -> None:
    """Balanced and crossed without repeats: the mean squares of a two-way analysis of variance."""
    rows, columns = 3, 3
    grand = sum(map(sum, TWO_WAY)) / 9
    by_row = [sum(r) / columns for r in TWO_WAY]
    by_column = [sum(c) / rows for c in zip(*TWO_WAY, strict=True)]
    ms_row = columns * sum((m - grand) ** 2 for m in by_row) / (rows - 1)
    ms_column = rows * sum((m - grand) ** 2 for m in by_column) / (columns - 1)
    rest = sum(
        (TWO_WAY[i][j] - by_row[i] - by_column[j] + grand) ** 2
        for i in range(rows)
        for j in range(columns)
    )
    within = rest / ((rows - 1) * (columns - 1))
    found = {c.source: c.variance for c in components(crossed(TWO_WAY), FACTORS).components}
    assert found["within"] == pytest.approx(within)
    assert found["process"] == pytest.approx((ms_row - within) / columns)
    assert found["prompt"] == pytest.approx((ms_column - within) / rows)


def test_without_factors_all_variance_is_within() -> None:
    found = [Observation(v, {}, str(i)) for i, v in enumerate([1.0, 2.0, 6.0])]
    (part,) = components(found, []).components
    assert part.variance == pytest.approx(variance([1.0, 2.0, 6.0]))
    assert components(found[:2], []).total_variance == 0.0


def expected_bounds(values: list[list[float]], source: str) -> tuple[float, float]:
    """Leave one block out, by the formula of the jackknife."""
    shares = []
    for left_out in range(len(values)):
        kept = [o for o in crossed(values) if o.block != f"b{left_out}"]
        parts = {c.source: c for c in components(kept, FACTORS).components}
        shares.append(parts[source].share)
    mean = sum(shares) / len(shares)
    squares = sum((s - mean) ** 2 for s in shares)
    error = math.sqrt((len(shares) - 1) / len(shares) * squares)
    return max(0.0, mean - 1.96 * error), min(1.0, mean + 1.96 * error)


@pytest.mark.parametrize(
    "values",
    [
        TWO_WAY,
        # Without the last block nothing varies: its share is nil there, not unknown.
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 4.0]],
        [[0.0, 5.0, 9.0], [0.1, 5.2, 9.1], [0.3, 4.9, 9.0], [9.0, 5.0, 0.0]],
    ],
)
def test_shares_have_jackknife_intervals(values: list[list[float]]) -> None:
    parts = components(crossed(values), FACTORS).components
    assert [p.source for p in parts] == ["process", "prompt", "within"]
    for part in parts:
        low, high = expected_bounds(values, part.source)
        assert (part.share_low, part.share_high) == (pytest.approx(low), pytest.approx(high))


def test_an_interval_of_shares_needs_three_blocks() -> None:
    two = components(crossed(TWO_WAY[:2]), FACTORS)
    assert {c.share_low for c in two.components} == {None}
    assert [c.levels for c in two.components] == [2, 3, 6]  # two levels can be told apart
    assert two.reason is None


def test_what_does_not_vary_has_no_shares() -> None:
    still = components(crossed([[1.0] * 3] * 3), FACTORS)
    assert [c.share for c in still.components] == [0.0, 0.0, 0.0]
    assert [(c.share_low, c.share_high) for c in still.components] == [(0.0, 0.0)] * 3


def test_a_design_that_separates_nothing_says_so() -> None:
    """Three factors use up all that four observations can tell: nothing is left for within."""
    corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [
        Observation(float(i * i), {"a": str(x), "b": str(y), "c": str(x ^ y)}, str(i))
        for i, (x, y) in enumerate(corners)
    ]
    result = components(found, ["a", "b", "c"])
    assert result.components == ()
    assert (result.total_variance, result.observations) == (0.0, 4)
    assert result.reason == "the design cannot separate the sources"
