"""From moments to what the optimizer sees: gradients may be clipped or unscaled between `backward()` and `step()`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from varreg.engine import Moments


class UnmeasuredError(Exception):
    """The gradient is not the one that was measured."""


class NotFiniteError(Exception):
    """There is an infinity or a nan in a gradient."""


def as_seen(m: Moments, grad: Tensor, same: bool) -> tuple[Tensor, Tensor | float]:
    """The gradient as the optimizer sees it, in the precision of the moments, and κ²: there, its variance is κ²v².

    Clipping and unscaling change the gradient from S to κS, one κ for the tensor, and so its variance to κ²v². Clipping by value has
    a κ for each element. Both leave ρ = v²/ḡ² what it was before. `same` says whether `grad` is the tensor that was measured, whatever
    has been done to it; another one must at least be a multiple of it.
    """
    S, g = m.total.reshape(-1), grad.to(m.total.dtype).reshape(-1)
    SS, gS, gg = (float(torch.dot(a, b)) for a, b in ((S, S), (g, S), (g, g)))
    if not math.isfinite(SS + gS + gg + float(m.square.sum())):
        raise NotFiniteError
    if gS == SS == gg:  # nothing has touched it
        return m.total, 1.0
    g = g.clone()
    if SS == 0:  # nothing but what was added
        return g.view_as(grad), 1.0
    kappa = gS / SS
    rounding = 10 * torch.finfo(S.dtype).eps + torch.finfo(grad.dtype).eps ** 2
    if kappa * gS >= (1 - rounding) * gg:  # g and S are parallel
        return g.view_as(grad), kappa**2
    if not same:
        raise UnmeasuredError
    return g.view_as(grad), _by_element(g, S, kappa**2).view_as(grad)


def _by_element(g: Tensor, S: Tensor, overall: float) -> Tensor:
    """κ² of each element, (g/S)².

    Clipping by value is known by several elements of the same, largest size. Anything else that was done to single elements may have
    added something, and then (g/S)² says nothing where S is small: it is held to the median of those that are not 0.
    """
    each = (g / S).square_().nan_to_num_(nan=overall, posinf=overall)
    size = g.abs()
    if int((size == size.max()).sum()) > 1:
        return each
    return each.clamp_(max=float(each[each > 0].median()))
