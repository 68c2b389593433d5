"""Create the statistics that are missing in a parameter's state."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from varreg import native
from varreg.backends import BACKENDS
from varreg.engine.contribution import stat_dtype
from varreg.optim.scopes import SCOPES
from varreg.optim.state import (
    CALIBRATION,
    COUNT,
    HISTORY,
    NARROW,
    STEPS,
    is_wide,
    narrow,
    statistics,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from varreg.optim.parameter_step import ParameterStep


@functools.cache
def needed(sums: tuple[str, ...], calibrate: bool) -> dict[str, None]:
    """Return the names of all statistics that an increment with these sums needs, as keys."""
    return dict.fromkeys((*sums, *HISTORY, STEPS, *(CALIBRATION if calibrate else ())))


def prepare(optimizer: Optimizer, step: ParameterStep) -> None:
    """Create the missing statistics. They are in float64 while the sums of squares are in
    float64.
    """
    p, m, group, sums = step.parameter, step.moments, step.group, step.increment.sums
    state = step.state = optimizer.state[p]
    wide = is_wide(state)
    dtype = stat_dtype(p.dtype)
    if m is not None and m.square.dtype != dtype:
        dtype = m.square.dtype
        state.update({key: value.double() for key, value in statistics(state).items()})
    elif dtype != torch.float64 and wide:
        dtype = narrow(state, dtype)
    missing = [key for key in needed(sums, group["calibrate"]) if key not in state]
    if STEPS in state and not set(sums).isdisjoint(missing):
        state[STEPS].zero_()  # an option was switched on after the first step: its sums start now
    scope = SCOPES[group["per"]]
    for key in missing:
        if key == COUNT and step.native and BACKENDS[p.device.type] is native:
            state[key] = _compact_count(step, dtype)
        elif key in HISTORY:
            state[key] = scope.begin_history(optimizer, key, p, dtype)
        elif key in sums:
            state[key] = torch.zeros_like(p, dtype=dtype)
        elif key == STEPS:  # read in each step: like torch's own count, it stays on the CPU
            state[key] = torch.zeros((), dtype=dtype, device="cpu")
        else:
            state[key] = torch.zeros((), dtype=dtype, device=p.device)
    if wide and step.regularized and m is not None and m.square.dtype != torch.float64:
        # the state was in float64 until now: take this step in float64, too
        step.moments = replace(m, total=m.total.double(), square=m.square.double())
        step.grad = step.grad.double()


def _compact_count(step: ParameterStep, dtype: torch.dtype) -> torch.Tensor:
    """Return the first count of a step by native code: one for all elements, as long as each has a
    ρ in every step, or else narrow ones.
    """
    p, kernel = step.parameter, step.increment.kernel
    if kernel is not None and kernel.shares_count:
        return torch.zeros((), dtype=dtype, device=p.device)
    return torch.zeros_like(p, dtype=NARROW if p.dim() else dtype)
