"""Compute λ of the last step again from the state, if the step did not store it.

Native code can do that if increment and variance depend only on the state, and every element had a
ρ in this step. So λ takes memory only when it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from varreg import native
from varreg.native.contract import Task
from varreg.optim.state import COUNT

if TYPE_CHECKING:
    from varreg.optim.parameter_step import ParameterStep


class RepeatedLambda(NamedTuple):
    """The task and tensors from which λ of one parameter is computed again."""

    task: Task
    """The task of the native step: its numbers, and pointers to the tensors."""
    state: tuple[Tensor, ...]
    """The tensors: they must stay alive while the task points to them. The last two are history and
    count.
    """

    def tensor(self) -> Tensor:
        """Return λ, in new memory."""
        lam = torch.empty_like(self.state[-2])
        _repeat(self.task, lam, lam=lam.data_ptr(), square=None)
        return lam


def split_count(step: ParameterStep, task: Task) -> None:
    """Give each element its own count, in the first step in which some elements have no ρ. Store λ
    of the step, if it is not stored yet.
    """
    valid = torch.empty_like(step.state["vr_history"])
    _repeat(task, valid, lam=None, variance=valid.data_ptr())
    step.state[COUNT] = count = valid + step.state[COUNT]
    lam: Tensor | None = step.lam
    if lam is None:
        step.lam = torch.empty_like(valid)
        rest = {"is_shared": 0, "rho_count": count.data_ptr()}
        _repeat(task, valid, lam=step.lam.data_ptr(), **rest)


def _repeat(task: Task, like: Tensor, **fields: int | None) -> None:
    """Call native code with some fields of a task changed."""
    task = Task.from_buffer_copy(task)
    for name, value in fields.items():
        setattr(task, name, value)
    native.repeat(task, like.dtype)
