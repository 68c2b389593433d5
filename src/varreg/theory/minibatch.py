"""S2.2: what the variance within a mini-batch says about the error of its mean.

With m samples drawn independently, σ² the variance of their mean gradient ḡ, and v² = (1/m) Σ (gᵢ − ḡ)² the variance that varreg measures,
E[v²] = (m − 1)σ². (One sample has variance mσ², and v² falls short of that by the variance of the mean itself.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

import varreg


class Ratio(NamedTuple):
    """E[v²]/σ², summed over all parameters, with its standard error; m − 1 is claimed."""

    value: float
    error: float


def ratio(m: int, batches: int, replace: bool = True, seed: int = 0) -> Ratio:
    """Of a small network on fixed data, at one point, over many mini-batches of m samples that varreg measures.

    Drawn without replacement (`replace=False`) samples are not independent, and it is not m − 1.
    """
    if m < 2:
        raise ValueError(f"varreg: a batch of {m} has no variance within it; use at least 2 samples.")
    generator = torch.Generator().manual_seed(seed)
    n, parts = 40, 10
    x, y = (torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (4, 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    within, means = [], []
    with varreg.observe(model):
        for _ in range(batches):
            index = torch.randint(n, (m,), generator=generator) if replace else torch.randperm(n, generator=generator)[:m]
            model.zero_grad()
            nn.functional.mse_loss(model(x[index]), y[index]).backward()
            found = [moments for p in model.parameters() if (moments := varreg.moments(p)) is not None]
            within.append(torch.cat([moments.variance.flatten() for moments in found]).sum())
            means.append(torch.cat([moments.mean.flatten() for moments in found]))
    each = [
        float(torch.stack(v).mean() / torch.stack(g).var(0).sum())
        for v, g in zip(_split(within, parts), _split(means, parts), strict=True)
    ]
    spread = torch.tensor(each, dtype=torch.float64)
    whole = float(torch.stack(within).mean() / torch.stack(means).var(0).sum())
    return Ratio(whole, float(spread.std() / parts**0.5))


def _split(values: list[torch.Tensor], parts: int) -> list[list[torch.Tensor]]:
    size = len(values) // parts
    return [values[i * size : (i + 1) * size] for i in range(parts)]
