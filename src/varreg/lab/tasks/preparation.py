"""Shared parts of several tasks: scale images, hold samples out for validation, and a loss per
token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.errors import VarregError
from varreg.lab.tasks import datasets
from varreg.lab.tasks.definition import Split, Splits


def unit_norm(images: datasets.Images) -> Split:
    """Return images scaled to Euclidean norm 1, as in the paper's experiments."""
    x = images.pixels.float()
    return Split(x / x.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1), images.labels)


def hold_out(train: Split, test: Split, valid: int, keep: int = 0) -> Splits:
    """Return splits with `valid` training samples held out for validation: the last ones of a fixed
    random order. The first `keep` of the others are trained on; 0: all.
    """
    rest = len(train) - valid
    if not 0 <= valid < len(train):
        raise VarregError(f"varreg: valid={valid} samples cannot be held out of {len(train)}.")
    if isinstance(keep, bool) or not isinstance(keep, int) or not 0 <= keep <= rest:
        raise VarregError(f"varreg: train={keep!r} of {rest:,} samples cannot be trained on.")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    fit, choose = order[: keep or rest], order[rest:]
    return Splits(Split(train.x[fit], train.y[fit]), Split(train.x[choose], train.y[choose]), test)


def per_token(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean over samples of the mean over a sample's tokens."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())
