"""From moments to what the optimizer sees: gradients may be clipped or unscaled between `backward()` and `step()`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from varreg.engine import Moments

_CHUNK = 1 << 18  # elements: what is computed along the way stays small, and in the cache

Part = dict[str, Tensor]
"""The same elements of several tensors of one parameter, by name."""


def parts(tensors: Part, shape: torch.Size) -> Iterator[Part]:
    """The tensors of a parameter's shape a chunk at a time; smaller ones (a step count) come along as they are."""
    flat = {k: t for k, t in tensors.items() if t.shape == shape}
    if shape.numel() <= _CHUNK or not all(t.is_contiguous() for t in flat.values()):
        yield dict(tensors)
        return
    flat = {k: t.view(-1) for k, t in flat.items()}
    for i in range(0, shape.numel(), _CHUNK):
        yield tensors | {k: t[i : i + _CHUNK] for k, t in flat.items()}


def as_seen(m: Moments, grad: Tensor) -> tuple[Tensor, Tensor | float] | None:
    """The gradient as the optimizer sees it, in the precision of the moments, and κ²: there, its variance is κ²v².

    Clipping and unscaling change the gradient from S to κS, one κ for the tensor, and so its variance to κ²v². Clipping by value has
    a κ for each element. Both leave ρ = v²/ḡ² what it was before. None where a number is not finite.
    """
    S = m.total
    g = grad.to(S.dtype)
    gg, gS, SS = (float(torch.dot(a.reshape(-1), b.reshape(-1))) for a, b in ((g, g), (g, S), (S, S)))
    if not math.isfinite(gg + gS + SS + float(m.square.sum()) * m.count):
        return None
    if gg == gS == SS:
        return S, 1.0
    kappa = gS / SS if SS else 0.0
    rounding = 10 * torch.finfo(S.dtype).eps + torch.finfo(grad.dtype).eps ** 2
    if gS**2 >= (1 - rounding) * gg * SS:
        return g, kappa**2
    return g, (g / S).square_().nan_to_num_(nan=kappa**2, posinf=kappa**2)
