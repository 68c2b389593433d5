"""Sums of contributions that are in memory. The definitions in PyTorch are `Dense` in
engine/contribution.py, and `row_sums` and `channel_sums` in engine/rules/rule.py.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg.triton.launch import group_of, launch, power, real, takes


@triton.jit
def sums_kernel(
    values, out, batch, groups, n, stride,
    BLOCK_U: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up S and W of a block of elements of `[batch, n]`, whose rows are `stride` apart."""
    REAL: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    S, W = tl.zeros((BLOCK_N,), REAL), tl.zeros((BLOCK_N,), REAL)
    most = tl.cdiv(batch, groups)  # samples of the largest group
    for start in range(0, groups, BLOCK_U):
        u = start + tl.arange(0, BLOCK_U)
        first, size = group_of(u, batch, groups)
        c = tl.zeros((BLOCK_U, BLOCK_N), REAL)
        for j in range(most):
            here = ((u < groups) & (j < size))[:, None] & (at < n)[None, :]
            rows = (first + j).to(tl.int64) * stride
            c += tl.load(values + rows[:, None] + at[None, :], here, 0.0).to(REAL)
        S += tl.sum(c, 0)
        W += tl.sum(c * c / tl.maximum(size, 1).to(REAL)[:, None], 0)
    tl.store(out + at, S, at < n)
    tl.store(out + n + at, W, at < n)
    tl.store(out + 2 * n + at, S, at < n)


def sums(values: Tensor, groups: int) -> tuple[Tensor, ...] | None:
    """Return S, W, and S again, of `[batch, *shape]` in groups of samples; None where PyTorch is
    needed.
    """
    if not groups or not takes(values):
        return None
    one = values[0]
    if not one.is_contiguous():
        return None
    n, out = one.numel(), values.new_empty((3, *one.shape), dtype=real(values.dtype))
    if n:
        block_n = power(n, 1, thresholds.TRITON_SUMS[1])
        meta = {"BLOCK_U": power(groups, 1, thresholds.TRITON_SUMS[0]), "BLOCK_N": block_n}
        sizes = len(values), groups, n, values.stride(0)
        grid = (triton.cdiv(n, block_n),)
        launch(sums_kernel, grid, values, values, out, *sizes, **meta)
    return out.unbind()


def total(values: Tensor) -> Tensor | None:
    """Return S of `[batch, *shape]`, by one reduction of PyTorch's."""
    return values.sum(0, dtype=real(values.dtype)) if len(values) and takes(values) else None


def rows(values: Tensor) -> Tensor | None:
    """Return None: PyTorch sums over rows in one launch, too."""
    return None


def pixels(values: Tensor) -> Tensor | None:
    """Return None: PyTorch sums over pixels in one launch, too."""
    return None
