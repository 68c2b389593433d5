"""From moments to what the optimizer sees: gradients may be clipped or unscaled between `backward()` and `step()`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from varreg.engine import Moments


class UnmeasuredError(Exception):
    """The gradient is not the one that was measured."""


class NotFiniteError(Exception):
    """There is an infinity or a nan in a gradient."""


class OverflowedError(Exception):
    """The gradient is finite, its squares were not."""


def products(m: Moments, grad: Tensor, precise: bool = False) -> Tensor:
    """S·S, g·S, g·g and ΣW: what is compared of a gradient and what was measured. They add up over shards.

    Where nothing but they can tell (`precise`), they are added up in double precision: rounding must not look like a change.
    """
    S, g = m.total.reshape(-1), grad.to(m.total.dtype).reshape(-1)
    if precise:
        S, g = S.double(), g.double()
    return torch.stack([torch.dot(S, S), torch.dot(g, S), torch.dot(g, g), m.square.sum().to(S.dtype)])


def as_seen(
    m: Moments, grad: Tensor, compared: Sequence[float], same: bool, precision: float = 0.0
) -> tuple[Tensor, Tensor | float]:
    """The gradient as the optimizer sees it, in the precision of the moments, and κ²: there, its variance is κ²v².

    The gradient is `m.total` where nothing has touched it, else `grad` itself where the precision is the same: not a copy.

    Clipping and unscaling change the gradient from S to κS, one κ for the tensor, and so its variance to κ²v². Clipping by value has
    a κ for each element. Both leave ρ = v²/ḡ² what it was before. `same` says whether `grad` is the tensor that was measured, whatever
    has been done to it; another one must at least be a multiple of it. `precision` is the rounding error with which it was computed, if that
    is coarser than its own: autograd's own gradient of an LSTM under autocast, say.
    """
    SS, gS, gg, W = compared
    finite = SS + gg + m.count * W <= _largest(m.total.dtype)  # also where the sums are in double precision; then, so is g·S
    if finite and gS == SS == gg:  # nothing has touched it
        return m.total, 1.0
    S, g = m.total.reshape(-1), grad.to(m.total.dtype).reshape(-1)
    if not finite:
        raise OverflowedError if bool(g.isfinite().all()) and bool(S.isfinite().all()) else NotFiniteError
    if SS == 0:  # nothing but what was added
        return g.view_as(grad), 1.0
    kappa = gS / SS
    eps = max(torch.finfo(grad.dtype).eps, precision)
    across = gg - kappa * gS  # what is left of g, squared, without its part along S
    if across <= 10 * torch.finfo(S.dtype).eps * gg + (eps * kappa) ** 2 * m.count * W:  # nothing but rounding: parallel
        return g.view_as(grad), kappa**2
    if not same:
        raise UnmeasuredError
    return g.view_as(grad), _by_element(g, S, kappa**2).view_as(grad)


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    """What leaves some room, for what increments add up over steps."""
    return torch.finfo(dtype).max * 2.0**-20


def kept(seen: Tensor, m: Moments) -> Tensor:
    """The gradient as it was seen, whatever happens to p.grad: some of torch's own steps change it."""
    return seen if seen is m.total else seen.clone()


def _by_element(g: Tensor, S: Tensor, overall: float) -> Tensor:
    """κ² of each element, (g/S)².

    Clipping by value is known by several elements of the same, largest size, and makes none larger than κ² of the others. Anything else
    that was done to single elements, rounding included, may have added something, and then (g/S)² says nothing where S is small. So it is
    held to the median: of those that are not 0, and were not clipped.
    """
    each = (g / S).square_().nan_to_num_(nan=overall, posinf=overall)
    size = g.abs()
    largest = size == size.max()
    others = each[(each > 0) & ~largest] if int(largest.sum()) > 1 else each[each > 0]
    return each.clamp_(max=float(others.median())) if len(others) else each
