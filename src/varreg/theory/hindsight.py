"""How much of what the best regularizer in hindsight would gain does a causal one catch?

A series of variances σ_t² is given. The hindsight optimum knows all of it (`optimum.py`); a form with a history knows the past. Both are judged by
Q = Σ λ_t(1 + λ_t/λ₀)σ_t² at a mean λ of 1: a causal λ is divided by its mean first, so that a shorter or a longer step is no gain. What is caught is

    (Q(1) − Q(λ/mean λ)) / (Q(1) − Q(optimum)),

1 for the optimum, 0 for a constant, negative for a λ that makes things worse.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from varreg import regularizer
from varreg.theory.optimum import objective, optimal


def causal(sigma2: Tensor, **options: object) -> Tensor:
    """λ_t of VR-SGD's regularizer with these options, from σ_1² … σ_t²."""
    chosen = {**regularizer.DEFAULTS, "scale_free": False, **options}
    regularizer.check(chosen)
    history, count, one = torch.zeros(3, 1, dtype=torch.float64).unbind()
    one = one + 1
    return torch.cat([regularizer.lambdas(v, one, history, count, 2, chosen) for v in sigma2.double().split(1)])


class Caught(NamedTuple):
    """What a regularizer catches of the hindsight optimum's gain, with its mean λ beside it."""

    share: float
    mean_lambda: float


def caught(lam: Tensor, sigma2: Tensor, lambda0: float) -> Caught:
    """Of a series of λ; a share of nan says that there is nothing to gain, all variances being equal."""
    sigma2, mean = sigma2.double(), float(lam.mean())
    if not mean > 0:
        return Caught(-math.inf, mean)
    plain = float(objective(torch.ones_like(sigma2), sigma2, lambda0))
    best = plain - float(objective(optimal(sigma2, lambda0), sigma2, lambda0))
    own = plain - float(objective(lam.double() / mean, sigma2, lambda0))
    return Caught(own / best if best > 1e-12 * plain else math.nan, mean)
