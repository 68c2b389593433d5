"""Compute the variance, λ, and the step that λ scales, in one pass over memory.

The definitions in PyTorch are `Moments`, varreg/regularizer.py and varreg/optim/step.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from varreg.native import library
from varreg.native.contract import Task
from varreg.thresholds import BLOCK


def serves(*tensors: Tensor) -> bool:
    """Return whether the library can work on these tensors: plain, on the CPU, contiguous, and of
    one type and shape.
    """
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for t in tensors:  # for every parameter at every step: no generator
        if (
            t.dtype != dtype
            or t.shape != shape
            or not t.is_contiguous()
            or type(t) not in library.PLAIN
            or not t.is_cpu
        ):
            return False
    return dtype in library.REALS and library.load()[0] is not None


def run(name: str, dtype: torch.dtype, tasks: ctypes.Array[Task], elements: int) -> None:
    """Call a function of the library for all tasks. Together they have `elements` elements."""
    library.for_tasks(name, dtype)(len(tasks), tasks, library.threads_for(elements))


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    task: Task,
) -> Tensor | None:
    """Record ρ in its history, and return λ; return None where PyTorch is needed. `task` has the
    options of the regularizer.
    """
    tensors = (variance, delta, history, count, *(() if present is None else (present,)))
    if not serves(*tensors):
        return None
    lam = torch.empty_like(delta)
    task.n, task.lam = lam.numel(), lam.data_ptr()
    task.variance, task.delta = variance.data_ptr(), delta.data_ptr()
    task.rho_sum, task.rho_count = history.data_ptr(), count.data_ptr()
    task.square = None if present is None else present.data_ptr()
    run("lambda", lam.dtype, (Task * 1)(task), lam.numel())
    return lam


def variance(
    total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor
) -> bool:
    """Write (m·W − S²)·factor into `out`, and 0 where that is no more than rounding errors. Return
    False where PyTorch is needed.
    """
    if not serves(total, square, out):
        return False
    n = out.numel()
    numbers = m, factor, rounding
    library.call("variance", (total, square, out), (n,), numbers, library.threads_for(n))
    return True


def compare(rows: Sequence[tuple[Tensor, ...]]) -> list[list[float]]:
    """Return S·S, g·S, g·g and ΣW of each (S, g, W), in double precision. All of one type take one
    pass. `serves` must have accepted the tensors.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, (S, _, _) in enumerate(rows):
        by_dtype.setdefault(S.dtype, []).append(i)
    out: list[list[float]] = [[]] * len(rows)
    for dtype, places in by_dtype.items():
        tasks = (Task * len(places))()
        elements = blocks = 0
        for task, i in zip(tasks, places, strict=True):
            S, g, W = rows[i]
            task.n = n = S.numel()
            task.total = at = S.data_ptr()
            task.grad, task.square = at if g is S else g.data_ptr(), W.data_ptr()
            elements, blocks = elements + n, blocks - (-n // BLOCK)
        # the function writes the sums of each block, and then those of each tensor over them
        sums = torch.empty(blocks, 4, dtype=torch.float64, device="cpu")
        at = sums.data_ptr()
        for task in tasks:
            task.products = at
        run("compare", dtype, tasks, elements)
        for i, values in zip(places, sums[: len(places)].tolist(), strict=True):
            out[i] = values
    return out


def repeat(task: Task, dtype: torch.dtype) -> None:
    """Compute λ of the last step again from the state, and write it to `task.lam`. If `task.lam` is
    0, write 1 to `task.variance` where ρ was finite, and 0 elsewhere.
    """
    run("repeat", dtype, (Task * 1)(task), task.n)


def whole(tasks: ctypes.Array[Task], dtype: torch.dtype, elements: int) -> None:
    """Take the whole step of parameters of one type, including the base's step. If a gradient is
    neither the measured one nor a multiple of it, its parameter and state do not change, and
    `is_left` of its task is 1.
    """
    blocks = 0
    for task in tasks:
        blocks -= -task.n // BLOCK
    sums = torch.empty(blocks, 4, dtype=torch.float64, device="cpu")
    for task in tasks:
        task.products = sums.data_ptr()
    run("whole", dtype, tasks, elements)


def update(
    like: Tensor, tasks: ctypes.Array[Task], elements: int, calibrated: bool = False
) -> None:
    """Finish the step after the base's step: compute variance, increment and λ, and set x to x +
    λ(x' − x). The parameters have the type of `like`. `calibrated`: λ of some tasks is calibrated.
    """
    if calibrated:
        blocks = sum(-(-task.n // BLOCK) for task in tasks)
        sums = torch.empty(blocks, 2, dtype=torch.float64, device="cpu")
        for task in tasks:
            task.products = sums.data_ptr()
    run("update", like.dtype, tasks, elements)
