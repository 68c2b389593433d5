"""S and W of matrix products and convolutions, without the per-sample gradients themselves. Twins, and definitions: engine/contribution.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varreg.memory import scratch
from varreg.native import library

_AT_ONCE = 1 << 20  # numbers that are packed at a time, unless a single group has more
_WORTH_THREADS = 1 << 18  # products
_PARTS = 64  # of a convolution's channels, which are worked on one after the other


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
    library.call("outer", (delta, a, total, square, sums, room), (b, groups, r, o, i, at_once), (), threads)
    return Sums(total, square, sums)


def conv(
    x: Tensor,
    delta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    per: int = 1,
    parts: int = 1,
    rows: bool = False,
) -> Sums | None:
    """Of a convolution's kernel `[o, c/parts, *kernel]`, from x `[b·per, c, …]` and δ `[b·per, o, …]`; None where it takes PyTorch.

    `padding` is what comes before the first pixel, `per` how many images a sample has, and `parts` into how many the convolution divides
    its channels (what torch calls groups; here these are groups of samples).
    """
    if x.dim() not in (3, 4) or not (x.numel() and delta.numel() and library.serves(x, delta)):
        return None
    (b, c), o = x.shape[:2], delta.shape[1]
    if 1 < parts < c and parts > _PARTS:
        return None
    total, square = x.new_empty(2, o, c // parts, *kernel)
    sums = x.new_empty(b, o) if rows else None
    threads = torch.get_num_threads() if delta.numel() * total[0].numel() > _WORTH_THREADS else 1
    if x.dim() == 3:
        x, delta = x.unsqueeze(2), delta.unsqueeze(2)
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)

    def described(x: Tensor, delta: Tensor) -> Tensor:
        pixels = (delta.shape[2] * delta.shape[3], 1) if delta.stride(3) == 1 else (delta.stride(1), delta.stride(3))
        sizes = (*(b, per, groups, *x.shape[1:], *delta.shape[1:]), *kernel, *stride, *padding, *dilation)
        return torch.tensor([*sizes, *x.stride(), delta.stride(0), *pixels, 0])

    if 1 < parts == c:
        x, delta = x.contiguous(), delta.contiguous()
        library.call("depthwise", (x, delta, total, square, sums, described(x, delta)), (), (), threads)
    else:
        x, delta = (
            t if parts == 1 and t.is_contiguous(memory_format=torch.channels_last) else t.contiguous() for t in (x, delta)
        )
        for k in range(parts):
            ours, theirs = x[:, k * c // parts : (k + 1) * c // parts], delta[:, k * o // parts : (k + 1) * o // parts]
            part = slice(k * o // parts, (k + 1) * o // parts)
            shape, given = (
                described(ours, theirs),
                (ours, theirs, total[part], square[part], None if sums is None else sums[:, part]),
            )
            library.call("conv", (*given, None, shape), (o,), (), threads)
            library.call("conv", (*given, scratch("native", (int(shape[-1]),), x), shape), (o,), (), threads)
    return Sums(total, square, sums if sums is None or per == 1 else sums.view(-1, per, o).sum(1))
