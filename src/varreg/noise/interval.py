"""Intervals for the ratio of two averages over steps, if neighbouring steps are correlated. Pure
functions of many series at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from varreg.thresholds import MOST_ALIKE, STANDARD_ERRORS


def covariance_of_mean(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the covariance of the means of series `[..., n, k]`, and the number of independent
    rows that would have the same covariance.

    First, the first-order autocorrelation r is removed from each series (Andrews and Monahan 1992):
    the variance of the mean of the residuals, divided by (1−r)², is that of the mean. Then the
    autocovariances of the residuals up to a lag L get the weights 1 − lag/(L+1) (Newey and West
    1987).
    """
    n = rows.shape[-2]
    d = rows - rows.mean(-2, keepdim=True)
    square = d.square().sum(-2) + torch.finfo(d.dtype).tiny
    r = (d[..., 1:, :] * d[..., :-1, :]).sum(-2) / square
    r = (r + (1 + 3 * r) / n).clamp(0, MOST_ALIKE)  # an estimate from n rows is too small
    e = torch.cat([d[..., :1, :], d[..., 1:, :] - r.unsqueeze(-2) * d[..., :-1, :]], -2)
    covariance = e.mT @ e
    last = int(n ** (1 / 3))
    for lag in range(1, last + 1):
        product = e[..., lag:, :].mT @ e[..., :-lag, :]
        covariance = covariance + (1 - lag / (last + 1)) * (product + product.mT)
    unfiltered = 1 / (1 - r)  # from residuals back to the series
    covariance = covariance * unfiltered.unsqueeze(-1) * unfiltered.unsqueeze(-2) / (n - 1)
    inflation = (covariance.diagonal(dim1=-2, dim2=-1) * (n - 1) / square).amax(-1).clamp(min=1.0)
    return covariance / n, n / inflation


def quantile(independent: Tensor) -> Tensor:
    """Return the number of standard errors to allow: two, and more if the standard error itself
    comes from few rows (Student's t, to second order).
    """
    z, degrees = STANDARD_ERRORS, (independent - 1).clamp(min=1.0)
    return (
        z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (6 * (4 * degrees) ** 2)
    )


def ratio_intervals(rows: Tensor) -> list[tuple[float, float]]:
    """Return bounds for E x/E y ≥ 0 for each of the series `[series, n, 2]` of (x, y), by Fieller's
    theorem. Between the bounds are all ratios for which the mean of x − ratio·y is at most two of
    its standard errors from 0.

    The upper bound is infinite if y is within two standard errors of 0. The bounds from one row are
    0 and infinity.
    """
    if rows.shape[1] < 2:
        return [(0.0, math.inf)] * len(rows)
    scale = rows.abs().mean(1).clamp(min=torch.finfo(rows.dtype).tiny)
    rows = rows / scale.unsqueeze(1)
    covariance, independent = covariance_of_mean(rows)
    allowed = covariance * quantile(independent).square()[:, None, None]
    parts = zip(rows.mean(1).tolist(), allowed.tolist(), scale.tolist(), strict=True)
    return [_fieller(x, max(y, 0.0), c, sx / sy) for (x, y), c, (sx, sy) in parts]


def _fieller(x: float, y: float, allowed: list[list[float]], unit: float) -> tuple[float, float]:
    """Return the ratios at which a·ratio² − 2b·ratio + c turns positive, in units of `unit`."""
    (xx, xy), (_, yy) = allowed
    if not x > 0 or not y + yy > 0:  # no row has noise, or no row has a signal
        return (0.0, 0.0) if not x > 0 else (math.inf, math.inf)
    a, b, c = y * y - yy, x * y - xy, x * x - xx
    root = math.sqrt(max(b * b - a * c, 0.0))
    low = unit * c / (b + root) if c > 0 and b + root > 0 else 0.0
    return low, unit * (b + root) / a if a > 0 else math.inf
