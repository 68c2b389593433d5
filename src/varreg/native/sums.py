"""S and W of matrix products and convolutions, without the per-sample gradients themselves. Twins, and definitions: engine/contribution.py."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from varreg.memory import room
from varreg.native import library

_AT_ONCE = 1 << 20  # numbers that are packed at a time, unless a single group has more
_WORTH_THREADS = 1 << 18  # products
_WIDTH = 32  # numbers of a panel: two vectors, at most


class Sums(NamedTuple):
    """Of one layer."""

    total: Tensor
    """S."""
    square: Tensor
    """W."""
    bias: Tensor | None
    """Both for c_b = Σ_r δ_br `[2, o]`, which is what a bias gets; None unless it was asked for."""


def outer(delta: Tensor, a: Tensor, groups: int, bias: bool = False) -> Sums | None:
    """Of c_b = Σ_r δ_br ⊗ a_br, with δ `[b, r, o]` and a `[b, r, i]`; None where it takes PyTorch."""
    (b, r, o), i = delta.shape, a.shape[2]
    if not (b and r and o and i and library.serves(delta, a)):
        return None
    delta, a = delta.contiguous(), a.contiguous()
    total, square, both = delta.new_empty(o, i), delta.new_empty(o, i), delta.new_empty(2, o) if bias else None
    threads = _threads(b * r * o * i)
    row, group = o + _WIDTH * threads, -(-b // groups) * r  # numbers that are packed for a row; rows of the largest group
    at_once = min(max(1, _AT_ONCE // (group * row)), groups)
    memory = room("native", b * o + group * at_once * row + 2 * _WIDTH * (threads + 1), delta)
    library.call("outer", (delta, a, total, square, both, memory), (b, groups, r, o, i, at_once), (), threads)
    return Sums(total, square, both)


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
    """Of a convolution's kernel `[o, c/parts, *kernel]`, from x `[b·per, c, …]` and δ `[b·per, o, …]`; None where it takes PyTorch.

    `padding` is what comes before the first pixel, `per` how many images a sample has, and `parts` into how many the convolution divides
    its channels (what torch calls groups; here these are groups of samples).
    """
    if x.dim() not in (3, 4) or not (x.numel() and delta.numel() and library.serves(x, delta)):
        return None
    depthwise, o = 1 < parts == x.shape[1], delta.shape[1]
    shape = (o, x.shape[1] // parts, *kernel)
    total, square, both = x.new_empty(shape), x.new_empty(shape), x.new_empty(2, o) if bias else None
    if x.dim() == 3:
        x, delta = x.unsqueeze(2), delta.unsqueeze(2)
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    (x, x_last), (delta, delta_last) = _in_order(x, depthwise), _in_order(delta, depthwise)
    how = kernel, stride, padding, dilation
    threads = _threads(delta.numel() * total[0].numel())
    numbers, needs = _described(x.shape, x_last, delta.shape, delta_last, how, groups, per, parts, x.dtype, threads)
    memory = room("native", needs, x)
    library.call("depthwise" if depthwise else "conv", (x, delta, total, square, both, memory, numbers), (), (), threads)
    return Sums(total, square, both)


@functools.lru_cache(maxsize=4096)
def _described(
    x: torch.Size,
    x_last: bool,
    delta: torch.Size,
    delta_last: bool,
    how: tuple[tuple[int, ...], ...],
    groups: int,
    per: int,
    parts: int,
    dtype: torch.dtype,
    threads: int,
) -> tuple[Tensor, int]:
    """A `shape` of sums.h, and how much memory it takes. Strides follow from shapes: those of a dimension of size 1 say nothing."""
    sizes = (x[0], per, groups, *x[1:], *delta[1:], *(n for pair in how for n in pair))
    image, channel, _, pixel = _strides(delta, delta_last)
    numbers = torch.tensor([*sizes, *_strides(x, x_last), image, channel, pixel, parts, 0])
    library.call("conv", (torch.empty(0, dtype=dtype), *(None,) * 5, numbers), (), (), threads)
    return numbers, int(numbers[-1])


def _strides(shape: torch.Size, last: bool) -> tuple[int, int, int, int]:
    _, c, h, w = shape
    return (c * h * w, 1, w * c, c) if last else (c * h * w, h * w, w, 1)


def _in_order(t: Tensor, strictly: bool) -> tuple[Tensor, bool]:
    """`[b, c, h, w]` with its pixels side by side, or (if not `strictly`) its channels; and are these last?"""
    last = not strictly and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
    return t if last else t.contiguous(), last


def _threads(products: int) -> int:
    return torch.get_num_threads() if products > _WORTH_THREADS else 1
