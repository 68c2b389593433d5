"""Dense layers and convolutions with the sum of W in place of W; lengths of tensors and of their
rows. Each takes one pass over memory.

The definitions in PyTorch are engine/total_squares.py and engine/totals_ledger.py.
"""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from varreg.native import layer_sums, library

outer = functools.partial(layer_sums.outer, sum_only=True)
conv = functools.partial(layer_sums.conv, sum_only=True)


def lengths(t: Tensor) -> tuple[float, float] | None:
    """Return Σ|t| and Σt² of a tensor, summed up in double precision; None where PyTorch is
    needed.
    """
    if not t.is_contiguous() or not library.serves(t):
        return None
    n = t.numel()
    threads = library.threads_for(n)
    parts = (ctypes.c_double * (2 * threads))()
    library.function("lengths", t.dtype, 2, 1, 0)(t.data_ptr(), parts, n, threads)
    return sum(parts[::2]), sum(parts[1::2])


def single(delta: Tensor, a: Tensor) -> tuple[float, float] | None:
    """Return Σ_b |δ_b|²|a_b|² and Σ_b |δ_b|² of δ `[b, o]` and a `[b, i]`: ΣW of a dense layer with
    one row per sample, and of its bias. None where PyTorch is needed.
    """
    if not library.serves(delta, a):
        return None
    delta, a = library.side_by_side(delta, 1), library.side_by_side(a, 1)
    (b, o), i = delta.shape, a.shape[1]
    threads = library.threads_for(b * (o + i))
    parts = (ctypes.c_double * (2 * threads))()
    run = library.function("single", delta.dtype, 3, 5, 0)
    run(delta.data_ptr(), a.data_ptr(), parts, b, o, i, delta.stride(0), a.stride(0), threads)
    return sum(parts[::2]), sum(parts[1::2])
