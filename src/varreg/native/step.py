"""λ, and the variance that it is made of, in one pass over memory. Twins, and definitions: Moments, and varreg/regularizer.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from varreg.native import library

_KINDS = {"sum": 0, "mean": 1, "harmonic": 2}
_FORMS = {"rational": 0, "affine": 1}


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    limit: float | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """λ, with ρ entered into its history; None where it takes PyTorch: another device, form or history, or memory in different orders."""
    tensors = (variance, delta, history, count, *(() if present is None else (present,)))
    if options["history"] not in _KINDS or options["form"] not in _FORMS:
        return None
    if not _serves(*tensors):
        return None
    from varreg.regularizer import bounds, lambda0_of

    low, high = bounds(options)
    lam = torch.empty_like(delta)
    s = float(options["s"])
    numbers = (
        s,
        lambda0_of(s) / 2,
        math.inf if limit is None else limit,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )
    kinds = (int(present is not None), _KINDS[options["history"]], _FORMS[options["form"]], int(options["scale_free"]))
    library.run("lambda", (*tensors[:4], variance if present is None else present, lam), kinds, numbers, lam.numel())
    return lam


def variance(total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor) -> bool:
    """(m·W − S²)·factor into `out`, and 0 where that is no more than rounding; False where it takes PyTorch."""
    if not _serves(total, square, out):
        return False
    library.run("variance", (total, square, out), (), (m, factor, rounding), out.numel())
    return True


def _serves(*tensors: Tensor) -> bool:
    """Can the library serve these: alike, and in one order?"""
    shape = tensors[0].shape
    return all(t.shape == shape and t.is_contiguous() for t in tensors) and library.serves(*tensors)
