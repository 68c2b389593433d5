"""From moments to what the optimizer sees: gradients may be clipped or unscaled between `backward()` and `step()`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from varreg.engine import Moments

UNRELATED = "unrelated"  # to what was measured


def as_seen(m: Moments, grad: Tensor) -> tuple[Tensor, Tensor | float] | str | None:
    """The gradient as the optimizer sees it, in the precision of the moments, and κ²: there, its variance is κ²v².

    Clipping and unscaling change the gradient from S to κS, one κ for the tensor, and so its variance to κ²v². Clipping by value has
    a κ for each element. Both leave ρ = v²/ḡ² what it was before. None where a number is not finite; UNRELATED where the gradient was
    replaced by one whose angle to S is beyond 70°, so that the moments are not its.
    """
    S, g = m.total.reshape(-1), grad.to(m.total.dtype).reshape(-1)
    SS, gS = float(torch.dot(S, S)), float(torch.dot(g, S))
    if not math.isfinite(SS + gS + float(m.square.sum())):
        return None
    if gS == SS:  # nothing has touched it
        return m.total, 1.0
    kappa, gg = gS / SS if SS else 0.0, float(torch.dot(g, g))
    if abs(kappa * gS) < 0.1 * gg:
        return UNRELATED
    g = g.clone()
    rounding = 10 * torch.finfo(S.dtype).eps + torch.finfo(grad.dtype).eps ** 2
    if kappa * gS >= (1 - rounding) * gg:  # g and S are parallel
        return g.view_as(grad), kappa**2
    return g.view_as(grad), (g / S).square_().nan_to_num_(nan=kappa**2, posinf=kappa**2).view_as(grad)
