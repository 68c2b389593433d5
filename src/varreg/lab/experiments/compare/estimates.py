"""Paired differences, with confidence intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES = 9999


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval. The interval is unbounded if there are too few values;
    the number is nan if there are none.
    """

    value: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        """Return whether there were enough values for an interval."""
        return math.isfinite(self.high - self.low)

    def excludes(self, x: float) -> bool:
        """Return whether the interval excludes x."""
        return self.low > x or self.high < x


NOTHING = Estimate(math.nan, math.nan, math.nan)


def mean_difference(a: list[float], b: list[float], level: float = 0.95) -> Estimate:
    """Return the mean of a − b over pairs, with its bootstrap-t interval (Efron and Tibshirani
    1993, chapter 12).

    Resampled means are divided by their own standard error. Such an interval has its nominal
    coverage with ten pairs, for which the usual percentile and BCa bootstraps are too short. It is
    unbounded for too few pairs.

    >>> mean_difference([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    Estimate(value=0.5, low=0.5, high=0.5)
    """
    d = np.subtract(a, b)
    n = len(d)
    if not n or not np.isfinite(d).all():
        return NOTHING
    mean = float(d.mean())
    if n == 1:
        return Estimate(mean, -math.inf, math.inf)
    if np.ptp(d) <= 1e-12 * np.abs(d).max():  # the same up to rounding
        return Estimate(mean, float(d.min()), float(d.max()))
    sample = d[np.random.default_rng(0).integers(n, size=(RESAMPLES, n))]
    shift, error = sample.mean(1) - mean, sample.std(1, ddof=1) / math.sqrt(n)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(
            np.ptp(sample, axis=1) > 0,
            shift / error,
            np.where(shift == 0, 0.0, np.copysign(np.inf, shift)),
        )
    low, high = np.quantile(t, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    scale = float(d.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - scale * float(high), mean - scale * float(low))


def median_ratio(a: list[float], b: list[float], level: float = 0.95) -> Estimate:
    """Return the median of a/b over pairs of positive numbers, with the exact interval of the sign
    test: from one of the sorted ratios to another.

    Either may be infinite, a target that was missed: finite over infinite is 0, infinite over
    infinite a tie.

    >>> median_ratio([10.0, math.inf, 30.0], [20.0, math.inf, 60.0]).value
    0.5
    """
    if not a:
        return NOTHING
    ratios = [
        1.0 if x == y else x / y if math.isfinite(y) else 0.0 for x, y in zip(a, b, strict=True)
    ]
    return _median(ratios, level, none=(0.0, math.inf))


def median_difference(a: list[float], b: list[float], level: float = 0.95) -> Estimate:
    """Return the median of a − b over pairs, with the exact interval of the sign test. A few pairs
    that are far away do not move it. It is unbounded for fewer than `fewest_pairs`.

    >>> median_difference([1.0, 2.0, 3.0, 4.0, 5.0, 900.0], [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    Estimate(value=0.5, low=0.5, high=894.5)
    """
    d = np.subtract(a, b)
    if not len(d) or np.isnan(d).any():
        return NOTHING
    return _median(d.tolist(), level, none=(-math.inf, math.inf))


def _median(values: list[float], level: float, none: tuple[float, float]) -> Estimate:
    """Return the median with its exact interval; `none` are the bounds where there are too few."""
    from scipy import stats  # here, since it takes a second

    bounds = stats.quantile_test(values, q=0.0, p=0.5).confidence_interval(level)
    low, high = (float(x) if x == x else end for x, end in zip(bounds, none, strict=True))
    return Estimate(float(np.median(values)), low, high)


def fewest_pairs(level: float) -> int:
    """Return the smallest number of pairs of which the median has an interval.

    >>> fewest_pairs(0.95), fewest_pairs(0.975)
    (6, 7)
    """
    return 1 + math.ceil(-math.log2(1 - level))


def sign_test(more: int, less: int) -> float:
    """Return the probability that at least this number of the pairs differ in one direction, if
    both directions are equally likely.

    >>> sign_test(6, 0)
    0.03125
    """
    from scipy import stats

    return float(stats.binomtest(more, more + less).pvalue) if more + less else 1.0
