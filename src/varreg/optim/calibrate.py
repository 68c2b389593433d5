"""Calibrate λ of many parameters by PyTorch, in few calls. Native steps calibrate by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from varreg import _torch, calibration
from varreg.optim.scopes import SCOPES
from varreg.optim.state import CALIBRATION
from varreg.regularizer import bounds

if TYPE_CHECKING:
    from varreg.optim.parameter_step import ParameterStep


def calibrate(steps: list[ParameterStep]) -> None:
    """Scale λ of each parameter so that its mean stays at 1. The parameters have one group,
    precision and device. The definition is `calibration.calibrated`.

    For sharded parameters, means are over all shards. That takes one reduction for all parameters
    before the scaling, and one after it.
    """
    scope = SCOPES[steps[0].group["per"]]
    lams, known = [step.lam for step in steps], scope.known(steps)
    count = scope.sums(known, steps)
    recent, sums, counts = (torch.stack([step.state[key] for step in steps]) for key in CALIBRATION)
    mean = scope.sums(list(_torch.foreach_mul(lams, known)), steps) / count
    scales = calibration.factor(mean, recent, sums, counts)
    scaled = _torch.foreach_mul(lams, list(scales.unbind()))
    low, high = bounds(steps[0].group)
    if low is not None:
        _torch.foreach_clamp_min_into(scaled, low)
    if high is not None:
        _torch.foreach_clamp_max_into(scaled, high)
    _torch.foreach_lerp_into(lams, scaled, known)
    calibration.add_mean(scope.sums(list(_torch.foreach_mul(lams, known)), steps) / count, sums)
    for key, values in zip(CALIBRATION, (recent, sums, counts), strict=True):
        _torch.foreach_copy([step.state[key] for step in steps], list(values.unbind()))
