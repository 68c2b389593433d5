"""How closely numbers have to agree, and the options that say what a sample's gradient is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from varreg.thresholds import FLOOR, RTOL, RTOL_COARSE

FLOAT64_RTOL = RTOL[torch.float64]


class Setting(NamedTuple):
    """What the user asked for, with the tolerance that was chosen."""

    reduction: str
    batch_dim: int
    rtol: float

    @property
    def floor(self) -> float:
        """Return the size, relative to the model's largest gradient, below which numbers are
        rounding.

        Gradients that are zero but for rounding (a bias before a softmax) have no size.
        """
        return min(1.0, max(FLOOR, self.rtol))

    def sum_factor(self, n: int) -> int:
        """Return the gradient of a batch of n over the mean of its samples' gradients."""
        return 1 if self.reduction == "mean" else n


def tolerance_for(model: nn.Module) -> float:
    """Return the tolerance for the coarsest type that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(torch.is_autocast_enabled(p.device.type) for p in trained):
        return RTOL_COARSE
    return max(RTOL.get(p.dtype, RTOL_COARSE) for p in trained)
