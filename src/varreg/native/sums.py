"""S and W of matrix products and convolutions, without the per-sample gradients themselves. Twins, and definitions: engine/contribution.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg.memory import scratch
from varreg.native import library

_AT_ONCE = 1 << 20  # numbers that are packed at a time, unless a single group has more
_WORTH_THREADS = 1 << 18  # products


class Sums(NamedTuple):
    """Of one layer."""

    total: Tensor
    """S."""
    square: Tensor
    """W."""
    rows: Tensor | None
    """Σ_r δ_br `[b, o]`, which is what each sample contributes to a bias; None unless it was asked for."""


def outer(delta: Tensor, a: Tensor, groups: int, rows: bool = False) -> Sums | None:
    """Of c_b = Σ_r δ_br ⊗ a_br, with δ `[b, r, o]` and a `[b, r, i]`; None where it takes PyTorch."""
    (b, r, o), i = delta.shape, a.shape[2]
    if not (b and r and o and i and library.serves(delta, a)):
        return None
    delta, a = delta.contiguous(), a.contiguous()
    total, square = delta.new_zeros(2, o, i)
    sums = delta.new_empty(b, o) if rows else None
    threads = torch.get_num_threads() if b * r * o * i > _WORTH_THREADS else 1
    group = -(-b // groups) * r
    at_once = min(max(1, _AT_ONCE // (group * (o + 32 * threads))), groups)
    room = scratch("native", (group * at_once * (o + 32 * threads) + 64 * (threads + 1),), delta)
    library.call("outer", delta.dtype, b, groups, r, o, i, delta, a, total, square, sums, room, at_once, threads)
    return Sums(total, square, sums)


def conv(
    x: Tensor,
    delta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    per: int = 1,
    rows: bool = False,
) -> Sums | None:
    """Of a convolution's kernel `[o, c, *kernel]`, from x `[b·per, c, …]` and δ `[b·per, o, …]`; None where it takes PyTorch.

    `padding` is what comes before the first pixel, and `per` how many images a sample has.
    """
    if x.dim() not in (3, 4) or not (x.numel() and delta.numel() and library.serves(x, delta)):
        return None
    shape = torch.Size((delta.shape[1], x.shape[1], *kernel))
    if x.dim() == 3:
        x, delta = x.unsqueeze(2), delta.unsqueeze(2)
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    x, delta = (_in_order(t) for t in (x, delta))
    numbers = (
        *(x.shape[0], per, groups, *x.shape[1:], *delta.shape[1:], *kernel, *stride, *padding, *dilation),
        *(*x.stride(), delta.stride(0), *_pixels(delta)),
    )
    described = (ctypes.c_int64 * len(numbers))(*numbers)
    total, square = x.new_empty(2, *shape)
    sums = x.new_empty(x.shape[0], shape[0]) if rows else None
    threads = torch.get_num_threads() if delta.numel() * total[0].numel() > _WORTH_THREADS else 1
    given: tuple[Any, ...] = (x, delta, total, square, sums)
    needs = library.call("conv", x.dtype, described, *(None,) * 6, threads)
    library.call("conv", x.dtype, described, *given, scratch("native", (needs,), x), threads)
    return Sums(total, square, sums if sums is None or per == 1 else sums.view(-1, per, shape[0]).sum(1))


def _in_order(t: Tensor) -> Tensor:
    """`[b, c, h, w]` with its pixels, or its channels, side by side."""
    return t if t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) else t.contiguous()


def _pixels(t: Tensor) -> tuple[int, int]:
    """The strides of channels and pixels. A dimension of size 1 has one that says nothing."""
    return (t.shape[2] * t.shape[3], 1) if t.is_contiguous() else (1, t.shape[1])
