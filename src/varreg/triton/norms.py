"""Contributions of samples to the affine parameters of a normalization: Σ dy·x̂ and Σ dy. x is
normalized again. The definitions in PyTorch are in engine/rules/normalization.py.
"""

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg.triton.launch import launch, real, splits, takes


@triton.jit
def norm_rows_kernel(
    x, dy, out, r, n, x_sample, x_row, dy_sample, dy_row, size, in_a_row,
    EPS: tl.constexpr, CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up dy·x̂ and dy over some rows of one sample, into `out [2, b, splits, n]`. `size` is
    b·splits·n.
    """
    REAL: tl.constexpr = out.dtype.element_ty
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    weight, bias = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
    for row in range(split * in_a_row, tl.minimum((split + 1) * in_a_row, r)):
        X = tl.load(x + sample * x_sample + row * x_row + at, at < n, 0.0).to(REAL)
        D = tl.load(dy + sample * dy_sample + row * dy_row + at, at < n, 0.0).to(REAL)
        if CENTRE:  # twice, since the mean of large numbers has a rounding error
            X = tl.where(at < n, X - tl.sum(X, 0) / n, 0.0)
            X = tl.where(at < n, X - tl.sum(X, 0) / n, 0.0)
        spread = tl.sqrt(tl.sum(X * X, 0) / n + EPS)
        weight += D * X / spread
        bias += D
    to = (sample * tl.num_programs(1) + split) * n + at
    tl.store(out + to, weight, at < n)
    tl.store(out + size + to, bias, at < n)


@triton.jit
def _sum(
    x, length, mean_1, mean_2,
    SQUARES: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Return the sum of x − mean, or of its squares."""
    lane, part = tl.arange(0, BLOCK), tl.zeros((BLOCK,), REAL)
    for at in range(0, length, BLOCK):
        here = at + lane < length
        X = tl.load(x + at + lane, here, 0.0).to(REAL) - mean_1 - mean_2
        part += tl.where(here, X * X if SQUARES else X, 0.0)
    return tl.sum(part, 0)


@triton.jit
def norm_channels_kernel(
    x, dy, mean, rstd, out, c, pixels, per, size,
    EPS: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up dy·x̂ and dy over the pixels of each channel, into `out [2, n, c]`. A program has one
    image and one group of `per` channels. It computes mean and 1/√variance, unless they are `GIVEN`
    for each channel.
    """
    REAL: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0)
    groups = c // per
    image, group = (program // groups).to(tl.int64), program % groups
    lane, length = tl.arange(0, BLOCK), per * pixels
    begin = (image * c + group * per) * pixels
    # the mean has two parts, since the mean of large numbers has a rounding error
    mean_1, mean_2, scale = tl.zeros((), REAL), tl.zeros((), REAL), tl.zeros((), REAL)
    if not GIVEN:
        mean_1 = _sum(x + begin, length, mean_1, mean_2, False, BLOCK, REAL) / length
        mean_2 = _sum(x + begin, length, mean_1, mean_2, False, BLOCK, REAL) / length
        spread = _sum(x + begin, length, mean_1, mean_2, True, BLOCK, REAL) / length
        scale = 1 / tl.sqrt(spread + EPS)
    for j in range(per):
        channel = group * per + j
        if GIVEN:
            mean_1, scale = tl.load(mean + channel), tl.load(rstd + channel)
        weight, bias = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
        for at in range(0, pixels, BLOCK):
            here = at + lane < pixels
            X = tl.load(x + begin + j * pixels + at + lane, here, 0.0).to(REAL)
            D = tl.load(dy + begin + j * pixels + at + lane, here, 0.0).to(REAL)
            weight += D * ((X - mean_1 - mean_2) * scale)
            bias += D
        to = image * c + channel
        tl.store(out + to, tl.sum(weight, 0))
        tl.store(out + size + to, tl.sum(bias, 0))


def norm_rows(
    x: Tensor, dy: Tensor, eps: float, centre: bool = True
) -> tuple[Tensor, Tensor] | None:
    """Return Σ_r dy·x̂ and Σ_r dy of `[b, r, *shape]`: `[b, *shape]` each. x̂ is x normalized over
    `shape`; with `centre`, its mean is subtracted first. Return None where PyTorch is needed.
    """
    n = math.prod(dy.shape[2:])
    if not takes(x, dy) or not dy.numel() or n > thresholds.TRITON_LONGEST_ROW:
        return None
    shape = dy.shape[0], *dy.shape[2:]
    x, dy = (t.reshape(*t.shape[:2], n) for t in (x, dy))
    x, dy = (t if t.stride(2) == 1 else t.contiguous() for t in (x, dy))
    b, r, _ = dy.shape
    in_a_row = triton.cdiv(r, splits(b, r))
    parts = triton.cdiv(r, in_a_row)
    out = dy.new_empty((2, b, parts, n), dtype=real(dy.dtype))
    block = triton.next_power_of_2(n)
    launch(
        norm_rows_kernel, (b, parts), dy,
        *(x, dy, out, r, n, *x.stride()[:2], *dy.stride()[:2], b * parts * n, in_a_row),
        EPS=eps, CENTRE=centre, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return _pair((out.sum(2) if parts > 1 else out[:, :, 0]).view(2, *shape))


def norm_channels(
    x: Tensor,
    dy: Tensor,
    groups: int,
    eps: float,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return Σ dy·x̂ and Σ dy of `[n, c, …]`: `[n, c]` each. x̂ is x normalized over groups of
    channels, or by each channel's `mean` and `var`. Return None where PyTorch is needed.
    """
    if not takes(x, dy) or not dy.numel():
        return None
    dtype = real(dy.dtype)
    given = mean is not None and var is not None
    rstd = None if var is None else (var.to(dtype) + eps).rsqrt().contiguous()
    mean = None if mean is None else mean.to(dtype).contiguous()
    n, c = dy.shape[:2]
    pixels, per = math.prod(dy.shape[2:]), 1 if given else c // groups
    out = dy.new_empty((2, n, c), dtype=dtype)
    block = min(thresholds.TRITON_BLOCK, triton.next_power_of_2(per * pixels))
    launch(
        norm_channels_kernel, (n * (c // per),), dy,
        *(x.contiguous(), dy.contiguous(), mean, rstd, out, c, pixels, per, n * c),
        EPS=eps, GIVEN=given, BLOCK=block,
    )  # fmt: skip
    return _pair(out)


def warps(block: int) -> int:
    """Return the number of warps that share a row: 8 elements for each thread, if possible."""
    return max(1, min(16, block // thresholds.TRITON_ROW_OF_A_WARP))


def _pair(both: Tensor) -> tuple[Tensor, Tensor]:
    first, second = both.unbind()
    return first, second
