"""Compute λ of the last step again from the state, if the step did not store it.

Native code can do that if increment and variance depend only on the state. It must also know which
elements had a gradient in the step; that takes a bit for each. So λ takes memory only when it is
read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg import native
from varreg.native.contract import Counts, Task
from varreg.optim.state import COUNT, FULL, HISTORY, NARROW, expand_count


class RepeatedLambda(NamedTuple):
    """The task and tensors from which λ of one parameter is computed again."""

    task: Task
    """The task of the native step: its numbers, and pointers to the tensors."""
    state: tuple[Tensor, ...]
    """The tensors: they must stay alive while the task points to them. The last two are history and
    count.
    """
    absent: Tensor
    """A bit for each element: 1 if it had no gradient in the step."""

    def tensor(self) -> Tensor:
        """Return λ, in new memory."""
        lam = torch.empty_like(self.state[-2])
        _repeat(self.task, lam, lam=lam.data_ptr())
        return lam


def bits(n: int) -> Tensor:
    """Return memory for a bit for each of n elements."""
    return torch.empty((n + 7) // 8, dtype=torch.uint8, device="cpu")


def change_counts(state: dict[str, Any], task: Task) -> None:
    """Replace counts that native code has outgrown: shared counts, in the first step in which only
    some elements had a ρ, by narrow ones; narrow ones by wide ones.
    """
    count = state[COUNT]
    if task.counts == Counts.SHARED:
        # in their last form from the start: a number of 4 bytes for each element would be the
        # largest memory of all in a first step
        before = count.item()
        kind = NARROW if before + 1 < FULL else count.dtype
        state[COUNT] = own = torch.full_like(state[HISTORY[0]], before, dtype=kind)
        form = Counts.NARROW if kind == NARROW else Counts.WIDE
        _repeat(task, count, lam=None, rho_count=own.data_ptr(), counts=form)
    else:
        expand_count(state)
    count = state[COUNT]
    task.counts = Counts.NARROW if count.dtype == NARROW else Counts.WIDE
    task.rho_count = count.data_ptr()


def _repeat(task: Task, like: Tensor, **fields: int | None) -> None:
    """Call native code with some fields of a task changed."""
    task = Task.from_buffer_copy(task)
    for name, value in fields.items():
        setattr(task, name, value)
    native.repeat(task, like.dtype)
