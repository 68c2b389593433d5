"""S and W of convolutions, without windows or per-sample gradients in memory. The definition in
PyTorch is `Convolution` in engine/rules/convolution.py.

A convolution is computed like a dense layer: its rows are output pixels, and its input features are
the pixels under the kernel. A tile loads these directly from the image.
"""

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg.native.layer_sums import Sums
from varreg.triton.dense import Parts, product, store_sums
from varreg.triton.launch import group_of, power, takes
from varreg.triton.settings import SETTINGS


@triton.jit
def conv_kernel(
    x, delta, out, batch, groups, per, o, i, part_o, part_c, h, w, oh, ow,
    x_image, x_channel, x_row, x_column, d_image, d_channel, d_row, d_column,
    sy, sx, py, px, dy, dx, in_a_row, size,
    KERNEL: tl.constexpr, KERNEL_W: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    CHAIN: tl.constexpr, DOT: tl.constexpr, BIAS: tl.constexpr, TWICE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up c_u = Σ δ ⊗ window over the images and pixels of each group, from x `[images, c, h,
    w]` and δ `[images, o, oh, ow]`. `part_o` and `part_c` are the channels of one part.
    """
    REAL: tl.constexpr = out.dtype.element_ty
    tile_i, tile_o, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(part_o, BLOCK_O)
    part, within = tile_o // tiles, (tile_o % tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_o = tl.where(within < part_o, part * part_o + within, o)  # o is masked below
    at_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    channel, ky, kx = at_i // KERNEL, at_i % KERNEL // KERNEL_W, at_i % KERNEL_W
    x_at = (part * part_c + channel).to(tl.int64) * x_channel
    pixels = oh * ow
    S, W = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O, BLOCK_I), REAL)
    bias_S, bias_W = tl.zeros((BLOCK_O,), REAL), tl.zeros((BLOCK_O,), REAL)
    last = tl.minimum((split + 1) * in_a_row, groups)
    for start in range(split * in_a_row, last, CHAIN):
        some_S, some_W = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O, BLOCK_I), REAL)
        some_bias_S, some_bias_W = tl.zeros((BLOCK_O,), REAL), tl.zeros((BLOCK_O,), REAL)
        for u in range(start, tl.minimum(start + CHAIN, last)):
            first, n = group_of(u, batch, groups)
            c, bias_c = tl.zeros((BLOCK_O, BLOCK_I), REAL), tl.zeros((BLOCK_O,), REAL)
            for row in range(0, n * per * pixels, BLOCK_R):
                rows = row + tl.arange(0, BLOCK_R)
                inside = rows < n * per * pixels
                image = (first * per + rows // pixels).to(tl.int64)
                oy, ox = rows % pixels // ow, rows % pixels % ow
                d_at = (image * d_image + oy * d_row + ox * d_column)[:, None]
                seen = inside[:, None] & (at_o < o)[None, :]
                d = tl.load(delta + d_at + at_o[None, :] * d_channel, seen, 0.0)
                y = (oy * sy - py)[:, None] + (ky * dy)[None, :]
                z = (ox * sx - px)[:, None] + (kx * dx)[None, :]
                seen = (
                    inside[:, None] & (at_i < i)[None, :] & (y >= 0) & (y < h) & (z >= 0) & (z < w)
                )
                at = (image * x_image)[:, None] + x_at[None, :] + y * x_row + z * x_column
                c += product(d, tl.load(x + at, seen, 0.0), DOT, PRECISION, REAL)
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
    """Return the sums of a convolution's kernel `[o, c/parts, *kernel]`, from x `[b·per, c, …]` and
    δ `[b·per, o, …]`; None where PyTorch is needed, as for three spatial dimensions.

    `padding` is the padding before the first pixel, `per` the number of images of a sample, and
    `parts` the number of parts into which the convolution divides its channels.
    """
    if x.dim() == 3:
        x, delta, kernel = x.unsqueeze(2), delta.unsqueeze(2), (1, *kernel)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    if x.dim() != 4 or not (x.numel() and delta.numel() and takes(x, delta)):
        return None
    if x.dtype != delta.dtype:
        return None
    o, part_o, part_c = delta.shape[1], delta.shape[1] // parts, x.shape[1] // parts
    i, tile, dot = part_c * math.prod(kernel), SETTINGS.tile, part_o > 2
    rows = -(-len(x) // per // groups) * per * delta[0, 0].numel()
    meta = {
        "KERNEL": math.prod(kernel),
        "KERNEL_W": kernel[1],
        "BLOCK_O": power(part_o, 16, tile.o) if dot else triton.next_power_of_2(part_o),
        "BLOCK_I": power(i, 16, tile.i),
        "BLOCK_R": power(rows, 16, tile.rows),
        "CHAIN": thresholds.TRITON_CHAIN,
        "DOT": dot,
        "BIAS": bias,
        "PRECISION": SETTINGS.precision,
        "num_warps": tile.warps,
        "num_stages": thresholds.TRITON_STAGES[1],
    }
    tiles = triton.cdiv(i, meta["BLOCK_I"]), triton.cdiv(part_o, meta["BLOCK_O"]) * parts
    made = Parts(tiles[0] * tiles[1], groups, (o, i), bias, delta)
    sizes = (
        *(len(x) // per, groups, per, o, i, part_o, part_c, *x.shape[2:], *delta.shape[2:]),
        *(*x.stride(), *delta.stride(), *stride, *padding, *dilation, made.in_a_row),
    )
    made.launch(conv_kernel, tiles, x, delta, sizes=sizes, **meta)
    return made.sums()
