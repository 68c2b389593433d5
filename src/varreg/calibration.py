"""Calibration: scale λ so that its mean over elements and steps stays at 1. Pure functions.

This is the constraint Σλ = T of the paper's problem (section 3), which the paper's algorithm does
not satisfy. The mean is over the elements for which some sample has a gradient in this step. The
other elements have no λ and take the base's step. All sums may be vectors with one entry per
tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from varreg.thresholds import RECENT


def calibrated(
    lam: Tensor,
    recent: Tensor,
    total: Tensor,
    steps: Tensor,
    low: float | None = None,
    high: float | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Return λ, scaled so that its mean over elements and steps stays near 1.

    λ is divided by its recent mean (an EMA over about ten steps), and multiplied by t/(Σλ + 1),
    which corrects for means above or below 1 in earlier steps. The three sums are updated in place.
    The result is clipped to the bounds. `known` is 1 for elements with a gradient; where it is 0, λ
    is neither counted nor scaled.

    >>> import torch
    >>> sums = [torch.zeros(()) for _ in range(3)]
    >>> means = [calibrated(torch.tensor(x), *sums).item() for x in (3.0, 1.0, 2.0, 3.0, 3.0, 1.0)]
    >>> round(sum(means) / 6, 2)
    0.96
    """
    known = torch.ones_like(lam) if known is None else known
    n = known.sum()
    scaled = lam * factor((lam * known).sum() / n, recent, total, steps)
    if low is not None or high is not None:
        scaled = scaled.clamp_(min=low, max=high)
    lam = torch.lerp(lam, scaled, known)
    add_mean((lam * known).sum() / n, total)
    return lam


def factor(mean: Tensor, recent: Tensor, total: Tensor, steps: Tensor) -> Tensor:
    """Return the factor for a λ with this mean. Update the recent mean and the number of means. A
    mean of nan (no element has a gradient) is skipped.
    """
    is_finite = mean.isfinite().to(mean.dtype)
    recent.lerp_(mean.nan_to_num(nan=0.0), is_finite * RECENT)
    steps.add_(is_finite)
    mean_now = recent / (1 - (1 - RECENT) ** steps)
    return (steps / (total + 1) / mean_now).nan_to_num_(nan=1.0, posinf=1.0)


def add_mean(mean: Tensor, total: Tensor) -> None:
    """Add the mean of the applied λ to the sum of all means."""
    total.add_(mean.nan_to_num(nan=0.0))
