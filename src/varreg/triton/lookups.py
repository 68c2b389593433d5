"""S and W of a table, from lookups of its rows. The definition in PyTorch is `SparseRows` in
engine/rules/embedding.py.

Lookups are sorted by row and group. A first kernel adds up the gradients of each (row, group), at
the position of its first lookup. A second kernel adds up these sums and their squares for each row.
The host does not wait for the device. The order of sums is fixed, so that results are reproducible
to the bit.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg.triton.launch import group_of, launch, power, real, takes


@triton.jit
def keys_kernel(ids, keys, lookups, r, batch, groups, skip, last, BLOCK: tl.constexpr):
    """Write row·groups + group of each lookup as its key; skipped lookups get the last keys."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, sample = tl.load(ids + at, at < lookups, 0).to(tl.int64), at // r
    n, larger = batch // groups, batch % groups
    early = larger * (n + 1)
    group = tl.where(sample < early, sample // (n + 1), larger + (sample - early) // n)
    key = tl.where(row == skip, last, row * groups + group)
    tl.store(keys + at, key, at < lookups)


@triton.jit
def groups_kernel(keys, order, dy, c, lookups, r, features, sample, step, BLOCK: tl.constexpr):
    """Write the sum of all lookups with one key to the place of the first, and 0 to the others."""
    REAL: tl.constexpr = c.dtype.element_ty
    here, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + here)
    before = tl.load(keys + here - 1, here > 0, -1)
    sums = tl.zeros((BLOCK,), REAL)
    if key != before:
        now, same = here, key
        while same == key:
            which = tl.load(order + now)
            row = dy + which // r * sample + which % r * step
            sums += tl.load(row + at, at < features, 0.0).to(REAL)
            now += 1
            same = tl.load(keys + now, now < lookups, -1)
    tl.store(c + here.to(tl.int64) * features + at, sums, at < features)


@triton.jit
def rows_kernel(
    keys, c, out, lookups, batch, groups, rows, features, size,
    BLOCK_L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up S and W of one row of the table. Only the program of its first lookup does so."""
    REAL: tl.constexpr = c.dtype.element_ty
    here, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(keys + here) // groups
    before = tl.load(keys + here - 1, here > 0, -1)
    if (row < rows) & ((before < 0) | (before // groups != row)):
        S, W = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
        now, more = here, row == row
        while more:
            lane = now + tl.arange(0, BLOCK_L)
            key = tl.load(keys + lane, lane < lookups, -1)
            same = (key >= 0) & (key // groups == row)
            seen = same[:, None] & (at < features)[None, :]
            C = tl.load(c + lane[:, None].to(tl.int64) * features + at[None, :], seen, 0.0)
            _, n = group_of(key % groups, batch, groups)
            S += tl.sum(C, 0)
            W += tl.sum(C * C / tl.maximum(n, 1).to(REAL)[:, None], 0)
            now += BLOCK_L
            more = tl.sum(same.to(tl.int32), 0) == BLOCK_L
        to = out + row * features + at
        tl.store(to, S, at < features)
        tl.store(to + size, W, at < features)
        tl.store(to + size + size, S, at < features)


def lookup(
    ids: Tensor, dy: Tensor, shape: torch.Size, groups: int, skip: int | None, squares: bool = True
) -> tuple[Tensor, ...] | None:
    """Return S, W, and S again, of a table whose rows `ids [b, r]` receive `dy [b, r, features]`;
    the row `skip` receives nothing. Return None where PyTorch is needed, as without `squares`.
    """
    if not (groups and squares and dy.numel() and takes(dy)) or ids.device != dy.device:
        return None
    dy = dy if dy.stride(2) == 1 else dy.contiguous()
    (batch, r, features), lookups = dy.shape, ids.numel()
    keys = torch.empty(lookups, dtype=torch.int64, device=dy.device)
    block = thresholds.TRITON_BLOCK
    sizes = lookups, r, batch, groups, -1 if skip is None else skip, shape[0] * groups
    blocks = (triton.cdiv(lookups, block),)
    launch(keys_kernel, blocks, dy, ids.contiguous(), keys, *sizes, BLOCK=block)
    keys, order = keys.sort(stable=True)
    c = dy.new_empty((lookups, features), dtype=real(dy.dtype))
    out = c.new_zeros((3, *shape))
    meta = {"BLOCK": power(features, 16, thresholds.TRITON_SUMS[1])}
    grid = lookups, triton.cdiv(features, meta["BLOCK"])
    launch(
        groups_kernel, grid, dy, keys, order, dy, c, lookups, r, features, *dy.stride()[:2], **meta
    )
    sizes = lookups, batch, groups, shape[0], features, shape.numel()
    meta["BLOCK_L"] = thresholds.TRITON_SUMS[0]
    launch(rows_kernel, grid, dy, keys, c, out, *sizes, **meta)
    return out.unbind()
