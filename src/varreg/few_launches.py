"""S and W by PyTorch, in few launches: the backend of devices for which varreg has no kernels.

It has those functions of the interface `Backend` (backends.py) that save launches. A function
returns None to leave the work to the definition in PyTorch. W is computed as √W, or as W less a
multiple of S², and `finish_squares` turns both into W at the end of the backward. So one reduction
reads the per-sample gradients, in place of a square and a sum; or one makes both S and W.

Letters: b samples, u groups of n samples, r rows of one sample, o and i features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg import _torch
from varreg.devices import filled
from varreg.native.layer_sums import Sums
from varreg.thresholds import DEVICE_CACHED, DEVICE_CHUNK

_ROOTS: list[Tensor] = []
"""Tensors that hold √W until `finish_squares()` makes them W."""

_SPREADS: list[tuple[Tensor, Tensor, float]] = []
"""Tensors that hold W − f·S² until `finish_squares()` makes them W, each with S and f."""


def root_of_squares(c: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor that holds Σ c² over a dimension after the next `finish_squares`."""
    root: Tensor = torch.linalg.vector_norm(c, 2, dim, dtype=dtype)
    _ROOTS.append(root)
    return root


def finish_squares() -> None:
    """Turn all roots and spreads into W, in place. No W of a device may be read before that."""
    roots, spreads = _ROOTS.copy(), _SPREADS.copy()
    del _ROOTS[: len(roots)], _SPREADS[: len(spreads)]
    for alike in by_type(roots):
        _torch.foreach_mul_into(alike, alike)
    others = {id(spread): rest for spread, *rest in spreads}
    for alike in by_type([spread for spread, *_ in spreads]):
        totals, factors = zip(*(others[id(t)] for t in alike), strict=True)
        _torch.foreach_addcmul_into(alike, totals, totals, factors)


def by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors grouped into lists, one for each device and type."""
    same: dict[Any, list[Tensor]] = {}
    for t in tensors:
        same.setdefault((t.device, t.dtype), []).append(t)
    return list(same.values())


def _type(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def both_sums(c: Tensor, dim: int = 0, n: int = 1) -> tuple[Tensor, Tensor]:
    """Return S and W of contributions of groups of n samples, which lie along a dimension."""
    total, root = c.sum(dim, dtype=_type(c)), root_of_squares(c, dim, _type(c))
    return total, root.mul_(n**-0.5) if n > 1 else root


def _sums_of_multiples(c: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return S and W of contributions of u groups of n samples, `[u, …]`, given u times each."""
    u = len(c)
    # the mean is S, and the sum of the squared deviations is u²(n·W − S²/u): divided by u²
    square, total = torch.var_mean(c, 0, correction=u - u * u)
    if n > 1:
        square.div_(n)
    _SPREADS.append((square, total.detach(), 1 / (u * n)))
    return total, square


def variance(
    total: Tensor, square: Tensor, m: int, scale: float, rounding: float, out: Tensor
) -> Tensor:
    """Return scale·(W − S²/m), and 0 where W − S²/m is within rounding errors of W."""
    v = torch.addcmul(square, total, total, value=-1 / m, out=out)
    above = torch.sub(v, square, alpha=rounding)
    # the derivative of ELU with α = 0: scale·v where `above` is positive, 0 elsewhere
    scaled: Tensor = torch.ops.aten.elu_backward(v, 0.0, scale, 1.0, False, above)
    return scaled


def where_positive(values: Tensor, condition: Tensor) -> Tensor:
    """Return values where a condition is positive, nan elsewhere."""
    # the derivative of a leaky ReLU whose slope below 0 is nan
    known: Tensor = torch.ops.aten.leaky_relu_backward(values, condition, torch.nan, False)
    return known


def sums(values: Tensor, groups: int) -> tuple[Tensor, ...] | None:
    """Return S and W of contributions `[b, …]`."""
    if not groups or len(values) % groups:
        return None
    n = len(values) // groups
    return both_sums(values if n == 1 else values.unflatten(0, (groups, n)).sum(1), n=n)


def outer(delta: Tensor, a: Tensor, groups: int, bias: bool = False) -> Sums | None:
    """Return S and W of c_b = Σ_r δ_br ⊗ a_br, and those of the bias, Σ_r δ_br."""
    (b, r, o), i = delta.shape, a.shape[2]
    if not groups or b % groups:
        return None
    elements = groups * o * (i + bias)
    # if per-sample gradients are few, adding a bias to them costs less than a separate launch
    if r == 1 and groups == b and (elements > DEVICE_CACHED or not bias):
        return _single_rows(delta[:, 0], a[:, 0], bias)
    if elements > DEVICE_CHUNK:
        return None
    delta, a = (t.reshape(groups, -1, t.shape[2]) for t in (delta, a))
    return _sums_of_products(delta.transpose(1, 2), a, bias, b // groups)


def _sums_of_products(delta: Tensor, a: Tensor, bias: bool, n: int) -> Sums:
    """Return S and W of the products δ `[u, o, r]` · a `[u, r, i]`, and those of Σ_r δ."""
    (u, o, r), i = delta.shape, a.shape[2]
    times = u if delta.dtype == _type(delta) else 1
    c = delta.new_empty(u, o * i + o * bias)
    w = o * i
    c[:, :w].unflatten(1, (o, i)).baddbmm_(delta, a, beta=0, alpha=times)
    if bias:
        each = filled(float(times), (r, 1), delta).expand(u, r, 1)
        torch.bmm(delta, each, out=c[:, w:].unsqueeze(2))
    total, square = both_sums(c, n=n) if times == 1 else _sums_of_multiples(c, n)
    # `.data` gives each view its own version: a write to one gradient is no write to the other
    weight = total[:w].view(o, i).data, square[:w].view(o, i)
    return Sums(*weight, (total[w:].data, square[w:]) if bias else None)


def _single_rows(delta: Tensor, a: Tensor, bias: bool) -> Sums:
    """Return the same for one row: (δ ⊗ a)² = δ² ⊗ a², and no per-sample gradient exists."""
    dtype = _type(delta)
    delta, a = delta.to(dtype), a.to(dtype)
    if bias and delta.numel() <= DEVICE_CACHED:
        times = filled(float(len(delta)), delta.shape, delta)
        delta2, a2, multiples = _torch.foreach_mul([delta, a, delta], [delta, a, times])
        return Sums(delta.t() @ a, delta2.t() @ a2, _sums_of_multiples(multiples, 1))
    delta2, a2 = _torch.foreach_mul([delta, a], [delta, a])
    both = (delta.sum(0), delta2.sum(0)) if bias else None
    return Sums(delta.t() @ a, delta2.t() @ a2, both)


def conv(
    x: Tensor,
    delta: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    *,
    per: int = 1,
    parts: int = 1,
    bias: bool = False,
) -> Sums | None:
    """Return S and W of a convolution: a product of δ with the inputs of each kernel position."""
    b, o, *out = delta.shape
    i, r = x.shape[1] * math.prod(kernel), math.prod(out)
    if parts > 1 or per > 1 or groups != b or not b or b * max(o * i + o, i * r) > DEVICE_CHUNK:
        return None
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(out, stride, kernel, dilation)]
    pads = [(p, max(0, n - p - size)) for p, n, size in zip(padding, reach, x.shape[2:])]
    if any(p for pair in pads for p in pair):
        x = F.pad(x, [p for pair in reversed(pads) for p in pair])
    strides = x.stride()
    windows = x.as_strided(
        (*x.shape[:2], *kernel, *out),
        (
            *strides[:2],
            *(s * d for s, d in zip(strides[2:], dilation)),
            *(s * t for s, t in zip(strides[2:], stride)),
        ),
    )
    a = windows.reshape(b, i, r).transpose(1, 2)
    return _sums_of_products(delta.reshape(b, o, r), a, bias, 1)


def norm_rows(x: Tensor, dy: Tensor, eps: float, centre: bool = True) -> Tensor | None:
    """Return Σ_r dy·x̂ and Σ_r dy of `[b, r, …]`, as `[2, b, …]`."""
    if x.dtype != dy.dtype:
        return None
    shape = x.shape[2:]
    normal = F.layer_norm(x, shape, eps=eps) if centre else F.rms_norm(x, shape, eps=eps)
    return _products(normal, dy, (1,), x.shape[:1] + shape)


def norm_channels(
    x: Tensor,
    dy: Tensor,
    groups: int,
    eps: float,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Tensor | None:
    """Return Σ dy·x̂ and Σ dy over the pixels of `[b, c, …]`, as `[2, b, c]`."""
    if mean is not None or x.dim() < 3 or x.dtype != dy.dtype:
        return None
    pixels = tuple(range(2, x.dim()))
    return _products(F.group_norm(x, groups, eps=eps), dy, pixels, x.shape[:2])


def _products(normal: Tensor, dy: Tensor, dims: tuple[int, ...], shape: torch.Size) -> Tensor:
    both = dy.new_empty(2, *shape)
    torch.sum(dy * normal, dims, out=both[0])
    torch.sum(dy, dims, out=both[1])
    return both


def lookup(
    ids: Tensor,
    dy: Tensor,
    shape: torch.Size,
    groups: int,
    skip: int | None,
    squares: bool = True,
) -> tuple[Tensor | None, ...] | None:
    """Return S and W of a lookup of rows `ids [b, r]` that receive `dy [b, r, features]`.

    If a group looks up a row k times, the sum for that row appears k times in `c`. So each square
    counts with the factor 1/k.
    """
    b, r = ids.shape
    skipped = -1 if skip is None else skip
    rows, dtype = shape[0], _type(dy)
    if not squares or not b or b % groups or b * r * (b // groups * r) > DEVICE_CHUNK:
        return None
    n = b // groups
    ids, dy = ids.reshape(groups, n * r), dy.reshape(groups, n * r, -1).to(dtype)
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)).to(dtype)
    c = torch.bmm(same, dy).square_().div_(same.sum(2, keepdim=True))
    total, square = (
        torch.ops.aten.embedding_dense_backward(t, ids, rows, skipped, False) for t in (dy, c)
    )
    return total, square.div_(n) if n > 1 else square
