"""Dense layers and convolutions with the sum of W in place of W; lengths of tensors and of their
rows. Each takes one pass over memory.

The definitions in PyTorch are engine/total_squares.py and engine/totals_ledger.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from torch import Tensor

from varreg.native import layer_sums, library

outer = functools.partial(layer_sums.outer, sum_only=True)
conv = functools.partial(layer_sums.conv, sum_only=True)


def lengths(tensors: Sequence[Tensor]) -> list[tuple[float, float]] | None:
    """Return Σ|t| and Σt² of each of some tensors of one type, summed up in double precision, by
    one call; None where PyTorch is needed.
    """
    if not library.serves(*tensors) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    n, sizes = len(tensors), [t.numel() for t in tensors]
    threads = library.threads_for(sum(sizes))
    sums = (ctypes.c_double * (2 * n * (1 + threads)))()
    places = (ctypes.c_void_p * n)(*[t.data_ptr() for t in tensors])
    run = library.function("lengths", tensors[0].dtype, 4, 1, 0)
    parts = ctypes.addressof(sums) + 2 * n * ctypes.sizeof(ctypes.c_double)
    run(places, (ctypes.c_int64 * n)(*sizes), sums, parts, n, threads)
    return list(zip(sums[: 2 * n : 2], sums[1 : 2 * n : 2], strict=True))


def single(delta: Tensor, a: Tensor) -> tuple[float, float] | None:
    """Return Σ_b |δ_b|²|a_b|² and Σ_b |δ_b|² of δ `[b, 1, o]` and a `[b, 1, i]`: ΣW of a dense
    layer with one row per sample, and of its bias. None where PyTorch is needed.
    """
    if not library.serves(delta, a):
        return None
    delta, a = library.side_by_side(delta, 1), library.side_by_side(a, 1)
    (b, _, o), i = delta.shape, a.shape[2]
    threads = library.threads_for(b * (o + i))
    parts = (ctypes.c_double * (2 * threads))()
    run = library.function("single", delta.dtype, 3, 5, 0)
    run(delta.data_ptr(), a.data_ptr(), parts, b, o, i, delta.stride(0), a.stride(0), threads)
    return sum(parts[::2]), sum(parts[1::2])
