"""Gradients whose squares overflow or underflow float32: compute the sums in float64 then.

ρ does not depend on the size of gradients, so it must not fail for 1e-20 or 1e25.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg.devices import has_float64, widest
from varreg.engine.contribution import Contribution
from varreg.engine.mean_variance import Moments
from varreg.thresholds import BACK_FROM, BACK_TO, LARGEST_SQUARE, SMALLEST_SQUARE

if TYPE_CHECKING:
    from varreg.engine.ledger import Ledger


def leaves_range(total: Tensor, square: Tensor) -> bool:
    """Return whether squares in float32 are too small, or too large, though the gradient is not."""
    if square.dtype != torch.float32 or not square.numel():
        return False
    largest = float(square.max())
    if largest < SMALLEST_SQUARE:  # W is 0 also where no sample had a gradient
        return bool(total.any())
    return not largest <= LARGEST_SQUARE and bool(total.isfinite().all())


def sums_in_range(
    ledger: Ledger, contribution: Contribution, total: Tensor, square: Tensor, copies: Sequence[Any]
) -> Any:
    """Return S and W of contributions; in float64 if squares leave the range of float32. Note the
    type in the ledger, for the next contributions.
    """
    if ledger.is_float64:
        largest = float(square.max()) if square.numel() else 0.0
        if BACK_FROM < largest < BACK_TO:
            ledger.is_float64 = False
            return total.float(), square.float()
    elif leaves_range(total, square):
        ledger.is_float64 = True
        return contribution.precise_sums()
    return total, square, *copies


def choose_precision(ledger: Ledger, m: Moments, SS: float, W: float) -> None:
    """Set the type of the next sums of a ledger: float64 if squares leave the range of float32,
    float32 if they are inside again. S·S and ΣW are given by the step, which has fetched them from
    the device.
    """
    square, usual = m.square, SMALLEST_SQUARE <= W <= LARGEST_SQUARE or SS == W == 0
    if ledger.is_float64 and not square.is_cpu:
        ledger.is_float64 = not BACK_FROM * square.numel() < W < BACK_TO
    elif not usual and has_float64(square.device):
        ledger.is_float64 = ledger.is_float64 or leaves_range(m.total, square)


def with_unknown_squares(m: Moments) -> Moments:
    """Return, in float64, moments whose squares left the range of float32; nan where squares are
    not known.
    """
    known = (m.square >= torch.finfo(m.square.dtype).tiny) & m.square.isfinite() | (
        m.total == 0
    ) & (m.square == 0)
    square = widest(m.square).masked_fill(~known, torch.nan)
    return replace(m, total=widest(m.total), square=square)
