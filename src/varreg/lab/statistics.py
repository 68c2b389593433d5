"""Paired differences, and how sure one can be of them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from scipy import stats

FAR = 1e9
"""Stands for infinity where a quantile is computed."""


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval; without one (nan) where there are too few values for it."""

    value: float
    low: float
    high: float

    def excludes(self, x: float) -> bool:
        """Does the interval say that it is not x?"""
        return self.low > x or self.high < x


def _interval(values: np.ndarray, statistic: object, level: float, method: str) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    if np.ptp(values) <= 1e-12 * np.abs(values).max():  # the same up to rounding
        return float(values.min()), float(values.max())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap((values,), statistic, confidence_level=level, method=method, rng=np.random.default_rng(0))
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def mean_difference(a: list[float], b: list[float], level: float = 0.95) -> Estimate:
    """The mean of a − b over pairs, with its BCa bootstrap interval.

    >>> mean_difference([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    Estimate(value=0.5, low=0.5, high=0.5)
    """
    differences = np.subtract(a, b)
    if not len(differences) or not np.isfinite(differences).all():
        return Estimate(math.nan, math.nan, math.nan)
    return Estimate(float(differences.mean()), *_interval(differences, np.mean, level, "BCa"))


def median_ratio(a: list[float], b: list[float], level: float = 0.95) -> Estimate:
    """The median of a/b over pairs of positive numbers, with its percentile bootstrap interval.

    Either may be infinite, a target that was missed: finite over infinite is 0, infinite over infinite a tie.

    >>> round(median_ratio([10.0, math.inf, 30.0], [20.0, math.inf, 60.0]).value, 9)
    0.5
    """
    if not a:
        return Estimate(math.nan, math.nan, math.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(a) - np.log(b)
    logs = np.clip(np.nan_to_num(logs, nan=0.0, posinf=FAR, neginf=-FAR), -FAR, FAR)
    low, high = _interval(logs, np.median, level, "percentile")
    return Estimate(*(_unlog(x) for x in (float(np.median(logs)), low, high)))


def _unlog(x: float) -> float:
    if math.isnan(x):
        return x
    return math.inf if x > 700 else math.exp(x) if x > -700 else 0.0
