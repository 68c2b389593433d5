"""The weights that a loss gives to samples: batch gradient = (1/n) Σ f_i g_i."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from varreg.devices import in_double
from varreg.thresholds import ALIKE, ALIKE_PRECISE, NOISE, SAME_LOSS
from varreg.verification.gaps import widen


def flatten(grads: dict[str, Tensor | None], params: Mapping[str, Tensor]) -> Tensor:
    """Return all gradients as one row of numbers."""
    wide = [widen(grads[n], in_double(torch.zeros_like(p))) for n, p in params.items()]
    return torch.cat([t.flatten() for t in wide])


def weights_of(each: Tensor, target: Tensor, rtol: float) -> Tensor | None:
    """Return weights f with target = (1/n) Σ f_i g_i; equal weights if these are a solution.

    Return None if there is no solution, or if there are several.
    """
    n, size = len(each), each.square().mean(0).sqrt().max()

    def fits(f: Tensor) -> bool:
        return bool((target - (f[:, None] * each).mean(0)).abs().max() <= NOISE * rtol * size)

    mean = each.mean(0)
    if mean.any():
        equal = (target @ mean / (mean @ mean)).expand(n)
        if fits(equal):
            return equal
    gram = each @ each.T
    spectrum = torch.linalg.eigvalsh(gram)
    if spectrum[0] <= (ALIKE[0] if rtol > ALIKE_PRECISE else ALIKE[1]) * spectrum[-1]:
        return None  # gradients are so similar that many weights are solutions
    f = n * torch.linalg.solve(gram, each @ target)
    return f if fits(f) else None


def explain_loss(weights: Tensor, losses: Tensor, batch_loss: float) -> bool:
    """Return whether weights that explain the gradient also explain the loss, and are not all 1."""
    is_loss = math.isclose(float((weights.cpu() * losses).mean()), batch_loss, rel_tol=SAME_LOSS)
    return is_loss and bool((weights - 1).abs().max() > SAME_LOSS)
