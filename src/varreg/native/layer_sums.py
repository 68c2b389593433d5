"""Compute S and W in one pass over memory: of contributions in memory; and of dense layers,
convolutions and lookups, without storing per-sample gradients.

The definitions in PyTorch are engine/contribution.py, and `SparseRows` in
engine/rules/embedding.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from varreg.memory import Workspace, ask_large_pages, zeros
from varreg.native import library
from varreg.native.contract import Convolution
from varreg.thresholds import (
    CHAIN,
    LARGE_PAGES,
    PACKED,
    PANEL,
    SHAPES,
    SHARED_ROWS,
    WORTH_THREADS_PRODUCTS,
)

_SCRATCH = Workspace()  # memory for packed inputs and partial sums of kernels

KNOWS_SINGLE_ROWS = False
"""Whether `outer` is the fastest way for one row per sample. On the CPU, `single_rows` is."""


class Sums(NamedTuple):
    """S and W of a layer's weight and, if asked for, of its bias."""

    total: Tensor
    """S."""
    square: Tensor
    """W; or some numbers in double precision that add up to the sum of W."""
    bias: Tensor | Sequence[Tensor] | None
    """S and W of the bias, `[2, o]`, whose contributions are c_b = Σ_r δ_br; None unless asked for.
    `[3, o]` if there is a second S.
    """
    again: Tensor | None = None
    """A second S in its own memory, if the kernel can write it without another launch."""
    norms: Tensor | None = None
    """|c_b|² of each sample, `[batch]` in double precision, if asked for and computed."""


def sums(values: Tensor, groups: int) -> tuple[Tensor, Tensor] | None:
    """Return S and W of `[batch, *shape]`, with samples in `groups` groups; None where PyTorch is
    needed.
    """
    at = library.leading_strides(values, 1)
    if at is None or not groups or not library.serves(values):
        return None
    total, square = values.new_empty(values.shape[1:]), values.new_empty(values.shape[1:])
    sizes = values.shape[0], groups, total.numel(), *at
    library.call("sums", (values, total, square), sizes, (), library.threads_for(values.numel()))
    return total, square


def total(values: Tensor) -> Tensor | None:
    """Return S of `[batch, *shape]`; None where PyTorch is needed."""
    at = library.leading_strides(values, 1)
    if at is None or not len(values) or not library.serves(values):
        return None
    out = values.new_empty(values.shape[1:])
    sizes = len(values), len(values), out.numel(), *at
    library.call("sums", (values, out, None), sizes, (), library.threads_for(values.numel()))
    return out


def outer(
    delta: Tensor,
    a: Tensor,
    groups: int,
    bias: bool = False,
    sum_only: bool = False,
    norms: bool = False,
) -> Sums | None:
    """Return the sums of c_b = Σ_r δ_br ⊗ a_br, with δ `[b, r, o]` and a `[b, r, i]`; None where
    PyTorch is needed. With `sum_only`, compute the sum of W over its elements, in place of W. With
    `norms`, compute |c_b|², too, if each group has one sample.
    """
    (b, r, o), i = delta.shape, a.shape[2]
    if not (b and r and o and i and library.serves(delta, a)):
        return None
    delta, a = delta.contiguous(), a.contiguous()
    threads = _threads(b * r * o * i)
    total, again, square = _new_sums(delta, (o, i), threads if sum_only else 0)
    both = delta.new_empty(2, o) if bias else None
    row = o + PANEL * threads  # packed numbers per row
    group = -(-b // groups) * r  # rows of the largest group
    at_once = min(max(1, PACKED // (group * row)), groups)
    memory = _SCRATCH.room(b * o + group * at_once * row + 2 * PANEL * (threads + 1), delta)
    sizes = b, groups, r, o, i, at_once
    if sum_only:
        library.call("outer_spread", (delta, a, total, square, both, memory), sizes, (), threads)
        return Sums(total, square, both)
    if norms and groups == b:
        extra = _extra(b, threads)
        tensors = delta, a, total, again, square, extra, both, memory
        library.call("outer_norms", tensors, sizes, (), threads)
        return Sums(total, square, both, again, extra[:b])
    library.call("outer", (delta, a, total, again, square, both, memory), sizes, (), threads)
    return Sums(total, square, both, again)


def _new_sums(
    like: Tensor, shape: tuple[int, ...], parts: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return memory for S, for a second S and for W. With `parts`, return memory for so many parts
    of the sum of W in place of W, and no second S.
    """
    total, again = like.new_empty(shape), None if parts else like.new_empty(shape)
    square = like.new_zeros(parts, dtype=torch.float64) if parts else like.new_empty(shape)
    if total.numel() >= LARGE_PAGES:
        ask_large_pages(total, square, total if again is None else again)
    return total, again, square


def single_rows(
    delta: Tensor, a: Tensor, bias: bool = False, groups: int | None = None
) -> tuple[Tensor, ...] | None:
    """Return S, W and a second S of c_b = δ_b ⊗ a_b, with δ `[b, o]` and a `[b, i]`; None where
    PyTorch or `outer` is needed. Each may also be `[b, 1, …]`. With `bias`, also return S and W of
    δ_b.
    """
    b, o, i = delta.shape[0], delta.shape[-1], a.shape[-1]
    groups = groups or b
    if not (b and o and i and library.serves(delta, a)) or CHAIN < groups != b:
        return None
    delta, a = delta.contiguous(), a.contiguous()
    threads = _threads(b * o * i)
    total, again, square = _new_sums(delta, (o, i))
    assert again is not None
    both = (delta.new_empty(o), delta.new_empty(o)) if bias else ()
    memory = _SCRATCH.room(b * (i + PANEL * (1 + 2 * threads)), delta)
    together = max(1, SHARED_ROWS // (b * PANEL))
    tensors = (delta, a, total, again, square, memory, *(both or (None, None)))
    library.call("single_rows", tensors, (b, groups, o, i, together), (), threads)
    return total, square, again, *both


def _extra(batch: int, threads: int) -> Tensor:
    """Return memory for the norms of samples, which each thread adds up by itself."""
    return torch.zeros(threads * batch * (1 + PANEL), dtype=torch.float64, device="cpu")


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
    sum_only: bool = False,
    norms: bool = False,
) -> Sums | None:
    """Return the sums of a convolution's kernel `[o, c/parts, *kernel]`, from x `[b·per, c, …]` and
    δ `[b·per, o, …]`; None where PyTorch is needed.

    `padding` is the padding before the first pixel, `per` the number of images of a sample, and
    `parts` the number of parts into which the convolution divides its channels. Torch calls these
    parts groups; here, groups are groups of samples. With `sum_only`, compute the sum of W over its
    elements, in place of W. With `norms`, compute |c_b|², too, if each group has one sample; not
    for a depthwise convolution.
    """
    if x.dim() not in (3, 4) or not (x.numel() and delta.numel() and library.serves(x, delta)):
        return None
    depthwise, o = 1 < parts == x.shape[1], delta.shape[1]
    weight = (o, x.shape[1] // parts, *kernel)
    both = x.new_empty(2, o) if bias else None
    if x.dim() == 3:
        x, delta = x.unsqueeze(2), delta.unsqueeze(2)
        kernel, stride, padding, dilation = (
            (1, *kernel),
            (1, *stride),
            (0, *padding),
            (1, *dilation),
        )
    (x, x_last), (delta, delta_last) = _in_order((x, delta), depthwise)
    how = kernel, stride, padding, dilation
    threads = _threads(delta.numel() * math.prod(weight[1:]))
    total, again, square = _new_sums(x, weight, threads if sum_only else 0)
    shape = _shape(
        x.shape, x_last, delta.shape, delta_last, how, groups, per, parts, x.dtype, threads
    )
    memory = _SCRATCH.room(shape.scratch, x)
    batch = x.shape[0] // per
    if sum_only or depthwise:
        name = ("depthwise" if depthwise else "conv") + "_spread" * sum_only
        library.call(name, (x, delta, total, square, both, memory), (), (), threads, shape)
        return Sums(total, square, both)
    if norms and groups == batch:
        extra = _extra(batch, threads)
        tensors = x, delta, total, again, square, extra, both, memory
        library.call("conv_norms", tensors, (), (), threads, shape)
        return Sums(total, square, both, again, extra[:batch])
    library.call("conv", (x, delta, total, again, square, both, memory), (), (), threads, shape)
    return Sums(total, square, both, again)


def lookup(
    ids: Tensor, dy: Tensor, shape: torch.Size, groups: int, skip: int | None, squares: bool = True
) -> tuple[Tensor, Tensor | None] | None:
    """Return S and W of a table whose rows `ids [b, r]` receive `dy [b, r, features]`; the row
    `skip` receives nothing. Without `squares`, return S and None. Return None where PyTorch is
    needed.
    """
    # the C code numbers rows by int32
    if not groups or shape[0] >= 1 << 31 or not ids.is_cpu or not library.serves(dy):
        return None
    ids, dy = ids.long().contiguous(), library.side_by_side(dy, 2)
    batch, r, features = dy.shape
    total = zeros(shape, dy)
    square = zeros(shape, dy) if squares else None
    compact = dy.new_empty(min(-(-batch // groups) * r, shape[0]), features)
    slots = torch.empty(shape[0] + 2 * ids.numel() + groups, dtype=torch.int32, device="cpu")
    sizes = shape[0], batch, groups, r, features, *dy.stride()[:2], -1 if skip is None else skip
    library.call(
        "lookup",
        (dy, ids, total, square, compact, slots),
        sizes,
        (),
        library.threads_for(dy.numel()),
    )
    return total, square


WITH_NORMS = SimpleNamespace(
    outer=functools.partial(outer, norms=True), conv=functools.partial(conv, norms=True)
)
"""The kernels of layers that also compute norms."""


@functools.lru_cache(maxsize=SHAPES)
def _shape(
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
) -> Convolution:
    """Return the sizes and strides of a convolution, and the scratch memory that it needs. Compute
    strides from shapes, since torch's stride of a dimension of size 1 is arbitrary.
    """
    (kh, kw), (sy, sx), (py, px), (dy, dx) = how
    x_image, x_channel, x_row, x_column = _strides(x, x_last)
    d_image, d_channel, _, d_pixel = _strides(delta, delta_last)
    shape = Convolution(
        images=x[0], per=per, groups=groups, parts=parts,
        c=x[1], h=x[2], w=x[3], o=delta[1], oh=delta[2], ow=delta[3],
        kh=kh, kw=kw, sy=sy, sx=sx, py=py, px=px, dy=dy, dx=dx,
        x_image=x_image, x_channel=x_channel, x_row=x_row, x_column=x_column,
        d_image=d_image, d_channel=d_channel, d_pixel=d_pixel,
    )  # fmt: skip
    # called without tensors, it only writes the size of its scratch memory
    nothing = torch.empty(0, dtype=dtype, device="cpu")
    library.call("conv", (nothing, *(None,) * 6), (), (), threads, shape)
    return shape


def _strides(shape: torch.Size, last: bool) -> tuple[int, int, int, int]:
    _, c, h, w = shape
    return (c * h * w, 1, w * c, c) if last else (c * h * w, h * w, w, 1)


def _in_order(images: tuple[Tensor, ...], strictly: bool) -> list[tuple[Tensor, bool]]:
    """Return each of some `[b, c, h, w]` in one of two memory layouts, and whether channels are
    last. With `strictly`, channels are never last.
    """
    ordered = []
    for t in images:
        may_be = not strictly and not t.is_contiguous()
        last = may_be and t.is_contiguous(memory_format=torch.channels_last)
        ordered.append((t if last else t.contiguous(), last))
    return ordered


def _threads(products: int) -> int:
    return torch.get_num_threads() if products > WORTH_THREADS_PRODUCTS else 1
