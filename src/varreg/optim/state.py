"""The regularizer's statistics in the optimizer's state: their names and their precision.

Names begin with vr_, so that they differ from all names of the base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg.engine.contribution import stat_dtype
from varreg.parallel.shards import local
from varreg.thresholds import STATISTICS

if TYPE_CHECKING:
    from torch.optim import Optimizer

COUNT = "vr_count"
"""The key of the number of ρ in the history of each element. PyTorch and checkpoints have a tensor
of the history's type. Native code on the CPU has less: one number if all elements have the same,
or narrow numbers, until one of them is too large for that.
"""
NARROW, FULL = torch.int16, torch.iinfo(torch.int16).max
HISTORY = ("vr_history", COUNT)
STEPS = "vr_steps"
CALIBRATION = ("vr_lambda_recent", "vr_lambda_total", "vr_lambda_steps")


def is_wide(state: Mapping[str, Any]) -> bool:
    """Return whether our statistics are in float64."""
    steps = state.get(STEPS)
    return steps is not None and steps.dtype == torch.float64


def narrow(state: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Convert all of our statistics to this precision, or to float64 if they are out of its range.
    Return the precision.
    """
    ours = statistics(state)
    wide = [local(v) for v in ours.values() if v.dtype == torch.float64 != dtype]
    sizes = [float(value.abs().max()) for value in wide if value.numel()]
    # an infinite value needs no wider range
    if any(0 < size < STATISTICS[0] or STATISTICS[1] < size < math.inf for size in sizes):
        dtype = torch.float64
    state.update({key: value.to(dtype) for key, value in ours.items()})
    return dtype


def restore(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load our statistics from a checkpoint in their own precision. torch would round them to the
    precision of the parameters.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in zip(ids, parameters, strict=True):
        for key, value in statistics(saved["state"].get(i, {})).items():
            optimizer.state[p][key] = value.to(device="cpu" if key == STEPS else p.device)
        narrow(optimizer.state[p], stat_dtype(p.dtype))


def expand_count(state: dict[str, Any]) -> None:
    """Give each element its own count in the history's type, if counts are shared or narrow."""
    count, history = state[COUNT], state[HISTORY[0]]
    if count.shape != history.shape or count.dtype != history.dtype:
        state[COUNT] = count.expand(history.shape).to(history.dtype, copy=True)


def with_counts(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which each element has its own count, so that checkpoints have the
    same form whether counts are shared or not. The optimizer's state does not change.
    """
    states = {key: dict(state) for key, state in saved["state"].items()}
    for state in states.values():
        if COUNT in state:
            expand_count(state)
    return {**saved, "state": states}


def compact_count(state: dict[str, Any], may_share: bool, is_new: bool = True) -> None:
    """Replace the counts of all elements, as PyTorch has them, by one shared count, if they are
    equal and may be shared; or else by narrow counts, if none is too large for that.

    Unless the counts are new (in a first step, or after a checkpoint), do not try if there were so
    many steps that a count may be too large: it would be tried in vain in each step.
    """
    count = state[COUNT]
    if not count.numel() or not (is_new or state[STEPS] < FULL):
        return
    if may_share and bool((count == count.flatten()[0]).all()):
        state[COUNT] = count.flatten()[0].clone()
    elif count.max() < FULL:
        state[COUNT] = count.to(NARROW)


def statistics(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return our statistics in the state of a parameter."""
    return {key: value for key, value in state.items() if key.startswith("vr_")}
