"""Sums of contributions, each in one pass over memory. None is returned where it takes PyTorch: another device, precision or order of memory.

Twins, and definitions: `Dense` in engine/contribution.py, and the rules for normalization and lookups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from varreg.native import library


def sums(values: Tensor, groups: int) -> tuple[Tensor, Tensor] | None:
    """S and W of `[batch, *shape]` in so many groups of samples."""
    at = _strides(values, 1)
    if at is None or not groups or not _serves(values):
        return None
    total, square = values.new_empty(values.shape[1:]), values.new_empty(values.shape[1:])
    sizes = values.shape[0], groups, total.numel(), *at
    library.call("sums", (values, total, square), sizes, (), library.threads_for(values.numel()))
    return total, square


def total(values: Tensor) -> Tensor | None:
    """S of `[batch, *shape]`."""
    at = _strides(values, 1)
    if at is None or not len(values) or not _serves(values):
        return None
    out = values.new_empty(values.shape[1:])
    library.call(
        "sums", (values, out, None), (len(values), len(values), out.numel(), *at), (), library.threads_for(values.numel())
    )
    return out


def rows(values: Tensor) -> Tensor | None:
    """`[b, r, *shape]` → `[b, *shape]`."""
    at = _strides(values, 2)
    if at is None or not _serves(values):
        return None
    out = values.new_empty(values.shape[0], *values.shape[2:])
    library.call(
        "rows", (values, out), (*values.shape[:2], math.prod(values.shape[2:]), *at), (), library.threads_for(values.numel())
    )
    return out


def pixels(values: Tensor) -> Tensor | None:
    """`[n, c, …]` → `[n, c]`."""
    if not _serves(values) or not values.is_contiguous():
        return None
    out = values.new_empty(values.shape[:2])
    library.call("pixels", (values, out), (out.numel(), math.prod(values.shape[2:])), (), library.threads_for(values.numel()))
    return out


def norm_rows(x: Tensor, dy: Tensor, eps: float, centre: bool = True) -> tuple[Tensor, Tensor] | None:
    """Σ_r dy·x̂ and Σ_r dy of `[b, r, *shape]`: `[b, *shape]` each, x̂ being x normalized over `shape`, and centred before if it is wanted."""
    if not _serves(x, dy):
        return None
    x, dy = _near(x, 2), _near(dy, 2)
    shape = dy.shape[0], *dy.shape[2:]
    weight, bias = dy.new_empty(shape), dy.new_empty(shape)
    sizes = *dy.shape[:2], math.prod(dy.shape[2:]), *x.stride()[:2], *dy.stride()[:2], int(centre)
    library.call("norm_rows", (x, dy, weight, bias), sizes, (eps,), library.threads_for(dy.numel()))
    return weight, bias


def norm_channels(
    x: Tensor, dy: Tensor, groups: int, eps: float, mean: Tensor | None = None, var: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Σ dy·x̂ and Σ dy of `[n, c, …]`: `[n, c]` each, x̂ being x normalized over groups of channels, or by each channel's mean and variance."""
    if not _serves(x, dy):
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


def lookup(
    ids: Tensor, dy: Tensor, shape: torch.Size, groups: int, skip: int | None, squares: bool = True
) -> tuple[Tensor, Tensor | None] | None:
    """S and W of a table of which rows `ids [b, r]` receive `dy [b, r, features]`, but for the row `skip`; S alone if W is not wanted."""
    if not groups or shape[0] >= 1 << 31 or not ids.is_cpu or not _serves(dy):
        return None
    ids, dy = ids.long().contiguous(), _near(dy, 2)
    batch, r, features = dy.shape
    total = dy.new_zeros(shape)
    square = dy.new_zeros(shape) if squares else None
    compact = dy.new_empty(min(-(-batch // groups) * r, shape[0]), features)
    slots = torch.empty(shape[0] + 2 * ids.numel() + groups, dtype=torch.int32)
    sizes = shape[0], batch, groups, r, features, *dy.stride()[:2], -1 if skip is None else skip
    library.call("lookup", (dy, ids, total, square, compact, slots), sizes, (), library.threads_for(dy.numel()))
    return total, square


def _serves(*tensors: Tensor) -> bool:
    """Does the library know them, and is there memory behind them? A gradient may be one of a batch of them, or of a subclass."""
    plain = all(type(t) is Tensor and torch._C._has_storage(t) for t in tensors)
    return plain and library.serves(*tensors)


def _strides(t: Tensor, lead: int) -> tuple[int, ...] | None:
    """How far apart entries of the leading dimensions are, where the others lie side by side."""
    size = 1
    for n, stride in zip(reversed(t.shape[lead:]), reversed(t.stride()[lead:]), strict=True):
        if n != 1 and stride != size:
            return None
        size *= n
    return t.stride()[:lead]


def _near(t: Tensor, lead: int) -> Tensor:
    return t if _strides(t, lead) is not None else t.contiguous()
