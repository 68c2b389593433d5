"""Calibration: λ so scaled that its mean over elements and steps stays at 1, as pure functions.

That is the constraint Σλ = T of the paper's problem (section 3), which its algorithm does not meet.
The mean is over the elements of which some sample has a gradient in this step: the others have no
λ, and take the base's step. All sums may be vectors, with a place for each tensor.
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
    """Return λ so scaled that its mean over elements and steps stays at 1, as far as the past can
    say.

    λ is divided by its recent mean (an EMA over about ten steps), and multiplied by t/(Σλ + 1) for
    what was spent too much or too little before. The three sums are brought up to date; the bounds
    hold for the result. `known` is 1 where an element has a gradient, and 0 elsewhere: there λ is
    neither counted nor scaled.

    >>> import torch
    >>> sums = [torch.zeros(()) for _ in range(3)]
    >>> spent = [calibrated(torch.tensor(x), *sums).item() for x in (3.0, 1.0, 2.0, 3.0, 3.0, 1.0)]
    >>> round(sum(spent) / 6, 2)
    0.96
    """
    known = torch.ones_like(lam) if known is None else known
    n = known.sum()
    scaled = lam * factor((lam * known).sum() / n, recent, total, steps)
    if low is not None or high is not None:
        scaled = scaled.clamp_(min=low, max=high)
    lam = torch.lerp(lam, scaled, known)
    spend((lam * known).sum() / n, total)
    return lam


def factor(mean: Tensor, recent: Tensor, total: Tensor, steps: Tensor) -> Tensor:
    """Return what λ of this mean is multiplied by; a mean of nan, where no element has a gradient,
    is left out. The recent mean and the number of means are brought up to date.
    """
    there = mean.isfinite().to(mean.dtype)
    recent.lerp_(mean.nan_to_num(nan=0.0), there * RECENT)
    steps.add_(there)
    now = recent / (1 - (1 - RECENT) ** steps)
    return (steps / (total + 1) / now).nan_to_num_(nan=1.0, posinf=1.0)


def spend(mean: Tensor, total: Tensor) -> None:
    """Add the mean of the λ that was used to the sum of all means."""
    total.add_(mean.nan_to_num(nan=0.0))
