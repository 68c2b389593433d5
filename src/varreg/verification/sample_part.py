"""Compare a sample's part of a batch's result with the result for that sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """The difference between a sample's part of the batch's result and the result for that sample
    alone.
    """

    gap: float
    """The largest difference, relative to the largest value of the batch's result."""
    has_rows: bool
    """True: the batch's result has a part for every sample. False: it is one value for all."""


def compare_part(batch: Tensor, single: Tensor, i: int, n: int) -> Part | None:
    """Compare the part of sample i of n with the result for that sample alone.

    Return None if the shapes do not show which part belongs to the sample.
    """
    if not batch.is_floating_point() or batch.dtype != single.dtype or batch.dim() != single.dim():
        return None
    different = [d for d in range(batch.dim()) if batch.shape[d] != single.shape[d]]
    if not batch.numel() or not single.numel():
        return None
    if not different:
        return Part(_gap([batch], single, batch), False)
    d = different[0]
    k = single.shape[d]
    if len(different) > 1 or batch.shape[d] != n * k:
        return None
    # In a dimension of n * k entries, the samples may be the outer, the inner or a middle factor.
    folds = (batch.unflatten(d, (a, n, k // a)) for a in range(1, k + 1) if k % a == 0)
    parts = [fold.select(d + 1, i).flatten(d, d + 1) for fold in folds]
    return Part(_gap(parts, single, batch), True)


def _gap(candidates: Sequence[Tensor], single: Tensor, batch: Tensor) -> float:
    """Return the largest difference between a part and the single sample's result, relative to the
    largest finite value of the batch. Of several possible parts, take the one that fits best.
    """
    size = float(batch.abs().nan_to_num(0.0, 0.0, 0.0).max())
    gaps = []
    for part in candidates:
        same = (part == single) | (part.isnan() & single.isnan())
        off = torch.where(same, 0.0, (part - single).abs()).nan_to_num(torch.inf, torch.inf)
        gaps.append(float(off.max()))
    return min(gaps) / size if size else (0.0 if min(gaps) == 0 else torch.inf)
