"""Sums for the noise scale, of many tensors in one call and in one pass over memory.

The definitions in PyTorch are `products` in optim/gradient.py and `l1_sums` in noise/measure.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from varreg.native import library
from varreg.thresholds import BLOCK

SUMS = 5
Row = tuple[Tensor, Tensor, tuple[float, float, float, float]]
"""S, W, and four numbers: m, the factor from m·W − S² to s², the rounding error of that difference,
and the factor from S to ḡ.
"""


def noise_sums(rows: Sequence[Row], l1: bool = False) -> list[list[float]]:
    """Return S·S, ΣW, Σ s, Σ|ḡ| and Σ e·exp(−4z²) of each (S, W, numbers), in double precision.
    The last three are 0 without `l1`. `serves` must have accepted the tensors.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for i, row in enumerate(rows):
        by_type.setdefault(row[0].dtype, []).append(i)
    out: list[list[float]] = [[]] * len(rows)
    for dtype, places in by_type.items():
        table: list[int] = []
        numbers: list[float] = []
        elements = blocks = 0
        for i in places:  # for every parameter at every step: plain lists are fastest
            S, W, its = rows[i]
            n = S.numel()
            table += n, S.data_ptr(), W.data_ptr()
            numbers += its
            elements, blocks = elements + n, blocks - (-n // BLOCK)
        found = (ctypes.c_double * (SUMS * len(places)))()
        room = torch.empty(SUMS * blocks, dtype=torch.float64, device="cpu")
        library.function("noise_sums", dtype, 4, 2, 0)(
            (ctypes.c_int64 * len(table))(*table),
            (ctypes.c_double * len(numbers))(*numbers),
            found,
            room.data_ptr(),
            len(places),
            l1,
            library.threads_for(elements),
        )
        for at, i in enumerate(places):
            out[i] = found[SUMS * at : SUMS * at + SUMS]
    return out
