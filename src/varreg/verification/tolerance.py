"""The tolerance of a comparison, and the options that define the gradient of a sample."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from varreg.thresholds import FLOOR, RTOL, RTOL_COARSE

FLOAT64_RTOL = RTOL[torch.float64]


class Setting(NamedTuple):
    """The user's options, with the chosen tolerance."""

    reduction: str
    batch_dim: int
    rtol: float

    @property
    def floor(self) -> float:
        """Return the size, relative to the model's largest gradient, below which a number counts as
        a rounding error.

        A gradient that is zero up to rounding, such as that of a bias before a softmax, has no size
        of its own to compare with.
        """
        return min(1.0, max(FLOOR, self.rtol))

    def sum_factor(self, n: int) -> int:
        """Return the factor between the gradient of a batch of n and its samples' mean gradient."""
        return 1 if self.reduction == "mean" else n


def tolerance_for(model: nn.Module) -> float:
    """Return the tolerance for the coarsest type among the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(torch.is_autocast_enabled(p.device.type) for p in trained):
        return RTOL_COARSE
    return max(RTOL.get(p.dtype, RTOL_COARSE) for p in trained)
