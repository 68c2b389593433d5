"""Calibrate λ of many parameters by PyTorch, in few calls. Native steps calibrate by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from varreg import _torch, calibration
from varreg.optim.state import CALIBRATION
from varreg.regularizer import bounds
from varreg.shards import is_sharded, total

if TYPE_CHECKING:
    from varreg.optim.step import ParameterStep


def calibrate(steps: list[ParameterStep]) -> None:
    """Scale λ of each parameter so that its mean stays at 1. The parameters have one group,
    precision and device. The definition is `calibration.calibrated`.

    For sharded parameters, means are over all shards. That takes one reduction for all parameters
    before the scaling, and one after it.
    """
    for step in steps:
        if not step.p.numel() and step.group["per"] == "element":  # an empty shard
            step.lam = torch.empty_like(step.measured.square)
    lams, known = [step.lam for step in steps], _known(steps)
    count = _sums(known, steps)
    recent, spent, times = (torch.stack([step.state[key] for step in steps]) for key in CALIBRATION)
    mean = _sums(_torch.foreach_mul(lams, known), steps) / count
    scales = calibration.factor(mean, recent, spent, times)
    scaled = _torch.foreach_mul(lams, list(scales.unbind()))
    low, high = bounds(steps[0].group)
    if low is not None:
        _torch.foreach_clamp_min_into(scaled, low)
    if high is not None:
        _torch.foreach_clamp_max_into(scaled, high)
    _torch.foreach_lerp_into(lams, scaled, known)
    calibration.spend(_sums(_torch.foreach_mul(lams, known), steps) / count, spent)
    for key, values in zip(CALIBRATION, (recent, spent, times), strict=True):
        _torch.foreach_copy([step.state[key] for step in steps], list(values.unbind()))


def _known(steps: list[ParameterStep]) -> list[Tensor]:
    """Return 1 for each element of λ that has a gradient in this step, and 0 for the others."""
    if steps[0].group["per"] != "element":
        return [torch.ones_like(step.lam) for step in steps]
    squares = [step.measured.square for step in steps]
    known = list(_torch.foreach_sub(squares, torch.finfo(squares[0].dtype).tiny))
    _torch.foreach_clamp_min_into(known, 0.0)
    _torch.foreach_sign_into(known)
    return known


def _sums(tensors: list[Tensor] | tuple[Tensor, ...], steps: list[ParameterStep]) -> Tensor:
    """Return the sum of each of the tensors over all shards. The tensors have no negative
    elements.
    """
    sums = torch.stack(list(_torch.foreach_norm(list(tensors), 1)))
    if steps[0].group["per"] == "element":
        sharded = [i for i, step in enumerate(steps) if is_sharded(step.parameter)]
        if sharded:
            sums[sharded] = total(sums[sharded].double(), steps[sharded[0]].parameter).to(sums)
    return sums
