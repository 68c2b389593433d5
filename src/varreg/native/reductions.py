"""Contributions of samples to a bias or to a normalization, in one pass over memory. A function
returns None where PyTorch is needed: for another device, precision or memory layout.

The definitions in PyTorch are engine/rules/rule.py and engine/rules/normalization.py.
"""

from __future__ import annotations

import math

from torch import Tensor

from varreg.native import library


def rows(values: Tensor) -> Tensor | None:
    """Sum `[b, r, *shape]` over rows: `[b, *shape]`."""
    at = library.leading_strides(values, 2)
    if at is None or not library.serves(values):
        return None
    out = values.new_empty(values.shape[0], *values.shape[2:])
    library.call(
        "rows",
        (values, out),
        (*values.shape[:2], math.prod(values.shape[2:]), *at),
        (),
        library.threads_for(values.numel()),
    )
    return out


def pixels(values: Tensor) -> Tensor | None:
    """Sum `[n, c, …]` over pixels: `[n, c]`."""
    if not library.serves(values) or not values.is_contiguous():
        return None
    out = values.new_empty(values.shape[:2])
    library.call(
        "pixels",
        (values, out),
        (out.numel(), math.prod(values.shape[2:])),
        (),
        library.threads_for(values.numel()),
    )
    return out


def norm_rows(
    x: Tensor, dy: Tensor, eps: float, centre: bool = True
) -> tuple[Tensor, Tensor] | None:
    """Return Σ_r dy·x̂ and Σ_r dy of `[b, r, *shape]`: `[b, *shape]` each. x̂ is x normalized over
    `shape`; with `centre`, its mean is subtracted first.
    """
    if not library.serves(x, dy):
        return None
    x, dy = library.side_by_side(x, 2), library.side_by_side(dy, 2)
    shape = dy.shape[0], *dy.shape[2:]
    weight, bias = dy.new_empty(shape), dy.new_empty(shape)
    sizes = *dy.shape[:2], math.prod(dy.shape[2:]), *x.stride()[:2], *dy.stride()[:2], int(centre)
    library.call("norm_rows", (x, dy, weight, bias), sizes, (eps,), library.threads_for(dy.numel()))
    return weight, bias


def norm_channels(
    x: Tensor,
    dy: Tensor,
    groups: int,
    eps: float,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return Σ dy·x̂ and Σ dy of `[n, c, …]`: `[n, c]` each. x̂ is x normalized over groups of
    channels, or by each channel's `mean` and `var`.
    """
    if not library.serves(x, dy):
        return None
    rstd = None if var is None else (var.to(x.dtype) + eps).rsqrt().contiguous()
    mean = None if mean is None else mean.to(x.dtype).contiguous()
    weight, bias = dy.new_empty(dy.shape[:2]), dy.new_empty(dy.shape[:2])
    sizes = *dy.shape[:2], math.prod(dy.shape[2:]), groups
    library.call(
        "norm_channels",
        (x.contiguous(), dy.contiguous(), mean, rstd, weight, bias),
        sizes,
        (eps,),
        library.threads_for(dy.numel()),
    )
    return weight, bias
