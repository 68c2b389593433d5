"""S and W of dense layers, without storing per-sample gradients. The definition in PyTorch is
`Outer` in engine/contribution.py.

A program computes one tile of the weight. It goes through the groups of samples, adds up the
product of each group over its rows, and adds the product to S and its square to W. The products
stay in registers; PyTorch would write them to memory and read them again. If there are few tiles,
the groups are divided among several programs. Their results are added up in a fixed order, so that
results are reproducible to the bit.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg.native.layer_sums import Sums
from varreg.triton.launch import group_of, launch, power, real, splits, takes
from varreg.triton.settings import SETTINGS

KNOWS_SINGLE_ROWS = True
"""`outer` has a kernel for samples with one row: one launch in place of four."""


@triton.jit
def product(d, a, DOT: tl.constexpr, PRECISION: tl.constexpr, REAL: tl.constexpr):
    """Return dᵀa of `[rows, o]` and `[rows, i]`: by matrix units, or, where o is small, by sums."""
    if DOT:
        return tl.dot(tl.trans(d), a, input_precision=PRECISION, out_dtype=REAL)
    return tl.sum(d[:, :, None].to(REAL) * a[:, None, :].to(REAL), 0)


@triton.jit
def store_sums(
    out, S, W, bias_S, bias_W, at_o, at_i, split, o, i, size,
    BIAS: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Write a tile of S and W to `[splits, 2, size]`. The sums of the bias come after those of the
    weight. With a single split, these are the final sums, and S is written twice, to `[3, size]`.
    """
    here = (at_o < o)[:, None] & (at_i < i)[None, :]
    first = out + split.to(tl.int64) * 2 * size
    second = first + size
    at = at_o[:, None].to(tl.int64) * i + at_i[None, :]
    tl.store(first + at, S, here)
    tl.store(second + at, W, here)
    if TWICE:
        tl.store(second + size + at, S, here)
    if BIAS:
        if tl.program_id(0) == 0:
            to = size - o + at_o
            tl.store(first + to, bias_S, at_o < o)
            tl.store(second + to, bias_W, at_o < o)
            if TWICE:
                tl.store(second + size + to, bias_S, at_o < o)


@triton.jit
def add_splits_kernel(parts, out, splits, size, BLOCK: tl.constexpr):
    """Add up `[splits, 2, size]`, one split after the other, and write S, W, and S again."""
    REAL: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    S, W = tl.zeros((BLOCK,), REAL), tl.zeros((BLOCK,), REAL)
    first, second = parts + at, parts + size + at
    for _ in range(splits):
        S += tl.load(first, at < size, 0.0)
        W += tl.load(second, at < size, 0.0)
        first, second = second + size, second + size + size
    tl.store(out + at, S, at < size)
    tl.store(out + size + at, W, at < size)
    tl.store(out + size + size + at, S, at < size)


@triton.jit
def outer_kernel(
    delta, a, out, batch, groups, r, o, i, in_a_row, size,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    CHAIN: tl.constexpr, BIAS: tl.constexpr, TWICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up c_u = Σ δ ⊗ a over the rows of each group, from δ `[b·r, o]` and a `[b·r, i]`."""
    REAL: tl.constexpr = out.dtype.element_ty
    tile_i, tile_o, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    at_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    S, W = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O, BLOCK_I), REAL)
    bias_S, bias_W = tl.zeros((BLOCK_O,), REAL), tl.zeros((BLOCK_O,), REAL)
    last = tl.minimum((split + 1) * in_a_row, groups)
    for start in range(split * in_a_row, last, CHAIN):
        some_S, some_W = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O, BLOCK_I), REAL)
        some_bias_S, some_bias_W = tl.zeros((BLOCK_O,), REAL), tl.zeros((BLOCK_O,), REAL)
        for u in range(start, tl.minimum(start + CHAIN, last)):
            first, n = group_of(u, batch, groups)
            c, bias_c = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O,), REAL)
            for row in range(0, n * r, BLOCK_R):
                rows = row + tl.arange(0, BLOCK_R)
                at = first.to(tl.int64) * r + rows[:, None]
                inside = (rows < n * r)[:, None]
                d = tl.load(delta + at * o + at_o[None, :], inside & (at_o < o)[None, :], 0.0)
                x = tl.load(a + at * i + at_i[None, :], inside & (at_i < i)[None, :], 0.0)
                c += product(d, x, True, PRECISION, REAL)
                if BIAS:
                    if tile_i == 0:
                        bias_c += tl.sum(d.to(REAL), 0)
            some_S += c
            some_W += c * c / n
            some_bias_S += bias_c
            some_bias_W += bias_c * bias_c / n
        S, W = S + some_S, W + some_W
        bias_S, bias_W = bias_S + some_bias_S, bias_W + some_bias_W
    store_sums(out, S, W, bias_S, bias_W, at_o, at_i, split, o, i, size, BIAS, TWICE)


@triton.jit
def single_rows_kernel(
    delta, a, out, batch, o, i, in_a_row, size,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    BIAS: tl.constexpr, TWICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up the same if each sample has one row and is its own group: (δ ⊗ a)² = δ² ⊗ a²."""
    REAL: tl.constexpr = out.dtype.element_ty
    tile_i, tile_o, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    at_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    S, W = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O, BLOCK_I), REAL)
    bias_S, bias_W = tl.zeros((BLOCK_O,), REAL), tl.zeros((BLOCK_O,), REAL)
    last = tl.minimum((split + 1) * in_a_row, batch)
    for row in range(split * in_a_row, last, BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        at, inside = rows[:, None].to(tl.int64), (rows < last)[:, None]
        d = tl.load(delta + at * o + at_o[None, :], inside & (at_o < o)[None, :], 0.0).to(REAL)
        x = tl.load(a + at * i + at_i[None, :], inside & (at_i < i)[None, :], 0.0).to(REAL)
        S += product(d, x, True, PRECISION, REAL)
        W += product(d * d, x * x, True, PRECISION, REAL)
        if BIAS:
            if tile_i == 0:
                bias_S += tl.sum(d, 0)
                bias_W += tl.sum(d * d, 0)
    store_sums(out, S, W, bias_S, bias_W, at_o, at_i, split, o, i, size, BIAS, TWICE)


def outer(delta: Tensor, a: Tensor, groups: int, bias: bool = False) -> Sums | None:
    """Return the sums of c_b = Σ_r δ_br ⊗ a_br, with δ `[b, r, o]` and a `[b, r, i]`; None where
    PyTorch is needed.

    In half precision, products are added up in float32; the definition rounds the product of each
    group to half precision.
    """
    (b, r, o), i = delta.shape, a.shape[2]
    if not (b and r and o and i and takes(delta, a) and delta.dtype == a.dtype):
        return None
    single = r == 1 and groups == b
    meta = _tile(o, i, b if single else -(-b // groups) * r, bias)
    pieces = triton.cdiv(b, meta["BLOCK_R"]) if single else groups
    tiles = triton.cdiv(i, meta["BLOCK_I"]), triton.cdiv(o, meta["BLOCK_O"])
    parts = Parts(tiles[0] * tiles[1], pieces, (o, i), bias, delta)
    inputs = delta.contiguous(), a.contiguous()
    if single:
        in_a_row = parts.in_a_row * meta["BLOCK_R"]
        parts.launch(single_rows_kernel, tiles, *inputs, sizes=(b, o, i, in_a_row), **meta)
    else:
        sizes, meta["CHAIN"] = (b, groups, r, o, i, parts.in_a_row), thresholds.TRITON_CHAIN
        parts.launch(outer_kernel, tiles, *inputs, sizes=sizes, **meta)
    return parts.sums()


def _tile(o: int, i: int, rows: int, bias: bool) -> dict[str, Any]:
    tile = SETTINGS.tile
    return {
        "BLOCK_O": power(o, 16, tile.o),
        "BLOCK_I": power(i, 16, tile.i),
        "BLOCK_R": power(rows, 16, tile.rows),
        "BIAS": bias,
        "PRECISION": SETTINGS.precision,
        "num_warps": tile.warps,
        "num_stages": thresholds.TRITON_STAGES[0],
    }


class Parts:
    """Memory for S and W of a weight and its bias. If there are too few programs, the work is
    divided into several splits, and each split has its own sums.
    """

    def __init__(
        self, programs: int, pieces: int, shape: tuple[int, int], bias: bool, like: Tensor
    ):
        self.in_a_row = triton.cdiv(pieces, splits(programs, pieces))  # pieces of one split
        self.splits, self.bias = triton.cdiv(pieces, self.in_a_row), bias
        self.shape, self.size = shape, shape[0] * (shape[1] + bias)
        dtype = real(like.dtype)
        self.out = like.new_empty((3, self.size), dtype=dtype)
        several = self.splits > 1
        self.parts = like.new_empty((self.splits, 2, self.size), dtype=dtype) if several else None

    def launch(
        self, kernel: Any, tiles: tuple[int, int], *inputs: Tensor, sizes: Any, **meta: Any
    ) -> None:
        """Run a kernel in every split, and add the splits up."""
        out = self.out if self.parts is None else self.parts
        grid, twice = (*tiles, self.splits), self.parts is None
        launch(kernel, grid, out, *inputs, out, *sizes, self.size, TWICE=twice, **meta)
        if self.parts is not None:
            block = thresholds.TRITON_BLOCK
            blocks = (triton.cdiv(self.size, block),)
            sizes = self.splits, self.size
            launch(add_splits_kernel, blocks, out, self.parts, self.out, *sizes, BLOCK=block)

    def sums(self) -> Sums:
        """Return the sums: S, W, and S a second time."""
        n = self.shape[0] * self.shape[1]
        total, square, again = (row[:n].view(self.shape) for row in self.out.unbind())
        return Sums(total, square, self.out[:, n:] if self.bias else None, again)
