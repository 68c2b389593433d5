"""S2.2: the relation between the variance within a mini-batch and the error of its mean.

With m samples drawn independently, σ² the variance of their mean gradient ḡ, and v² = (1/m) Σ (gᵢ −
ḡ)² the variance that varreg measures, E[v²] = (m − 1)σ². (One sample has variance mσ²; v² is
smaller by the variance of the mean itself.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

import varreg
from varreg.errors import VarregError


class Ratio(NamedTuple):
    """E[v²]/σ², summed over all parameters, with its standard error. The paper claims m − 1."""

    value: float
    error: float


def ratio(m: int, batches: int, replace: bool = True, seed: int = 0) -> Ratio:
    """Return E[v²]/σ² of a small network on 40 samples, at fixed parameters. varreg measures v² of
    many mini-batches of m samples.

    σ² is known: for independent draws, it is the variance of a single sample's gradient over the 40
    samples, divided by m. Without replacement (`replace=False`) it is smaller by the factor of a
    finite population, so that the ratio is not m − 1.
    """
    if m < 2:
        raise VarregError(
            f"varreg: a batch of {m} has no variance within it; use at least 2 samples."
        )
    generator = torch.Generator().manual_seed(seed)
    n = 40
    x, y = (torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (4, 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    within = []
    with varreg.observe(model):

        def variance(index: torch.Tensor) -> float:
            """Return v² of these samples, summed over all parameters."""
            model.zero_grad()
            nn.functional.mse_loss(model(x[index]), y[index]).backward()
            return sum(
                float(moments.variance.sum())
                for p in model.parameters()
                if (moments := varreg.moments(p)) is not None
            )

        sigma2 = variance(torch.arange(n)) / m * (1 if replace else (n - m) / (n - 1))
        for _ in range(batches):
            index = (
                torch.randint(n, (m,), generator=generator)
                if replace
                else torch.randperm(n, generator=generator)[:m]
            )
            within.append(variance(index) / sigma2)
    values = torch.tensor(within, dtype=torch.float64)
    return Ratio(float(values.mean()), float(values.std() / batches**0.5))
