"""Intervals hold what they promise, and say nothing where there is too little to say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from varreg.lab.experiments.compare.estimates import mean_difference, median_ratio, sign_test


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("n", "level"), [(5, 0.95), (10, 0.95), (10, 0.975), (20, 0.95)])
@pytest.mark.parametrize("draw", ["normal", "uniform", "exponential"])
def test_intervals_cover(n, level, draw):
    """Intervals of a mean difference hold the truth about as often as they say; a skewed
    distribution costs them a little.
    """
    rng = np.random.default_rng(n)
    truth, repeats, hits = {"normal": 0.0, "uniform": 0.5, "exponential": 1.0}[draw], 400, 0
    for _ in range(repeats):
        d = getattr(rng, draw)(size=n)
        e = mean_difference(list(d), [0.0] * n, level)
        hits += not e.excludes(truth)
        assert e.value == pytest.approx(d.mean())
    allowance = 0.055 if draw == "exponential" else 0.03
    assert hits / repeats >= level - allowance


def test_too_few_for_an_interval():
    for pairs in ([1.0], [1.0, 2.0], [1.0, 2.0, 4.0]):
        e = mean_difference(pairs, [0.0] * len(pairs))
        assert (e.low, e.high) == (-math.inf, math.inf)
    assert math.isnan(mean_difference([], []).value)
    assert mean_difference([1.0, 2.0], [0.0, 1.0]).low == 1.0  # the same difference twice


def test_ratios_with_misses():
    inf = math.inf
    e = median_ratio([10.0] * 6, [20.0] * 6)
    assert (e.value, e.low, e.high) == (0.5, 0.5, 0.5)
    assert median_ratio([inf] * 6, [20.0] * 6).value == inf
    assert median_ratio([10.0] * 6, [inf] * 6).value == 0
    assert median_ratio([inf] * 6, [inf] * 6).value == 1
    mixed = median_ratio([10.0, 12.0, inf, 11.0, 13.0, 9.0], [20.0] * 6)
    assert mixed.value == pytest.approx(0.575)
    assert (mixed.low, mixed.high) == (0.45, inf)
    assert median_ratio([1.0] * 5, [2.0] * 5).high == inf  # five pairs cannot say anything at 95 %
    assert math.isnan(median_ratio([], []).value)


def test_the_interval_of_a_median_covers():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(500):
        e = median_ratio(list(np.exp(rng.normal(size=10))), [1.0] * 10)
        hits += e.low <= 1 <= e.high
    assert hits / 500 >= 0.95


def test_the_sign_test():
    assert sign_test(0, 0) == sign_test(1, 1) == 1.0
    assert sign_test(5, 0) == pytest.approx(0.0625)
    assert sign_test(1, 9) == pytest.approx(2 * 11 / 1024)


def test_differences_that_are_equal_up_to_rounding():
    e = mean_difference([0.3, 0.7, 1.1], [0.1, 0.5, 0.9])  # 0.2, but for the last bits
    assert (e.value, e.low, e.high) == (pytest.approx(0.2),) * 3
