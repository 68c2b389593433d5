"""λ, what it is made of, and the step that it scales, in one pass over memory.

Twins, and definitions: `Moments`, varreg/regularizer.py, and varreg/optim/step.py.
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
    """Return whether the library can work on these: plain tensors, alike, and in one order."""
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
    """Call a function of the library for all tasks, which have so many elements together."""
    library.for_tasks(name, dtype)(len(tasks), tasks, library.threads_for(elements))


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    task: Task,
) -> Tensor | None:
    """Return λ, with ρ entered into its history; None where PyTorch is needed. `task` has the
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
    """Write (m·W − S²)·factor into `out`, and 0 where that is no more than rounding; return False
    where PyTorch is needed.
    """
    if not serves(total, square, out):
        return False
    n = out.numel()
    numbers = m, factor, rounding
    library.call("variance", (total, square, out), (n,), numbers, library.threads_for(n))
    return True


def compare(rows: Sequence[tuple[Tensor, ...]]) -> list[list[float]]:
    """Return S·S, g·S, g·g and ΣW of each (S, g, W), which `serves` must have accepted; in double
    precision, and in one pass for all of one type.
    """
    return _four_sums("compare", rows)


def _four_sums(
    name: str, rows: Sequence[tuple[Tensor, ...]], numbers: Sequence[Sequence[float]] = ()
) -> list[list[float]]:
    """Return the four sums that a function of the library leaves of each (S, g, W). `numbers` has
    what it needs beside them: m, factor, rounding and scale of each.
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
            if numbers:
                task.m, task.factor, task.rounding, task.scale = numbers[i]
            elements, blocks = elements + n, blocks - (-n // BLOCK)
        sums = torch.empty(
            blocks, 4, dtype=torch.float64, device="cpu"
        )  # of each block; then, of each tensor
        at = sums.data_ptr()
        for task in tasks:
            task.products = at
        run(name, dtype, tasks, elements)
        for i, values in zip(places, sums[: len(places)].tolist(), strict=True):
            out[i] = values
    return out


def l1(rows: Sequence[tuple[Tensor, Tensor, Sequence[float]]]) -> list[list[float]]:
    """Return Σ s, Σ|ḡ| and Σ e·exp(−4z²) of each (S, W, numbers), which `serves` must have
    accepted; in double precision, and in one pass for all of one type. Numbers are m, what m·W − S²
    is multiplied by for s², what rounding may leave of it, and what S is multiplied by for ḡ.
    """
    found = _four_sums("l1", [(S, S, W) for S, W, _ in rows], [numbers for *_, numbers in rows])
    return [sums[:3] for sums in found]


def repeat(task: Task, dtype: torch.dtype) -> None:
    """Write λ of a step that was taken to `task.lam`, from what the step left in the state; or,
    without `task.lam`, 1 to `task.variance` where its ρ was finite, and 0 elsewhere.
    """
    run("repeat", dtype, (Task * 1)(task), task.n)


def whole(tasks: ctypes.Array[Task], dtype: torch.dtype, elements: int) -> None:
    """Take the whole step of parameters of one type, the base's included. A task `is_left` if its
    gradient is neither what was measured nor a multiple of it: nothing of it was changed then.
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
    """Do what comes after the base's step, for parameters of a tensor's type: variance, increment,
    λ, and x + λ(x' − x). `calibrated` says whether λ of some task is.
    """
    if calibrated:
        blocks = sum(-(-task.n // BLOCK) for task in tasks)
        sums = torch.empty(blocks, 2, dtype=torch.float64, device="cpu")
        for task in tasks:
            task.products = sums.data_ptr()
    run("update", like.dtype, tasks, elements)
