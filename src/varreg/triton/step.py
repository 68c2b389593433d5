"""Compute the variance, λ, and the step that λ scales. One launch serves all parameters: it reads a
table of `Task` that is copied to the device.

The definitions in PyTorch are `Moments`, varreg/regularizer.py and varreg/optim/step.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg.native.contract import Task
from varreg.triton.calibration_kernels import calibrate_kernel, mean_kernel
from varreg.triton.launch import launch, takes
from varreg.triton.step_kernels import (
    add_up_kernel,
    compare_kernel,
    lambda_kernel,
    update_kernel,
    variance_kernel,
)

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (torch.float32, torch.float64)
_WORDS = ctypes.sizeof(Task) // 8


def serves(*tensors: Tensor) -> bool:
    """Return whether the kernels can work on these tensors: plain, of one type and device, and with
    the same strides.
    """
    lead = tensors[0]
    for t in tensors:
        if (
            t.dtype != lead.dtype
            or t.shape != lead.shape
            or t.device != lead.device
            or not t.is_contiguous()
            or type(t) not in _PLAIN
        ):
            return False
    return lead.dtype in _NUMBERS and takes(lead.detach())


class Table:
    """A table of tasks on a device, with the number of the first block of each task."""

    def __init__(self, tasks: Sequence[Task], like: Tensor):
        sizes = [triton.cdiv(task.n, thresholds.TRITON_BLOCK) for task in tasks]
        *firsts, self.blocks = accumulate(sizes, initial=0)
        words = torch.empty(len(tasks) * (_WORDS + 1), dtype=torch.int64, device="cpu")
        for k, task in enumerate(tasks):
            place = words.data_ptr() + k * ctypes.sizeof(Task)
            ctypes.memmove(place, ctypes.addressof(task), ctypes.sizeof(Task))
        words[len(tasks) * _WORDS :] = torch.tensor(firsts, device="cpu")
        self.words, self.tasks, self.like = words.to(like.device, non_blocking=True), tasks, like

    def run(self, kernel: Any, **meta: Any) -> None:
        """Launch a kernel for all blocks of all tasks."""
        dtype = self.like.dtype
        launch(
            kernel, (self.blocks,), self.like, self.words, len(self.tasks),
            TASKS=triton.next_power_of_2(len(self.tasks)), BLOCK=thresholds.TRITON_BLOCK,
            REAL=tl.float64 if dtype == torch.float64 else tl.float32,
            TINY=torch.finfo(dtype).tiny, **meta,
        )  # fmt: skip


def _kind(task: Task) -> dict[str, Any]:
    return {
        "HISTORY": int(task.history),
        "FORM": int(task.form),
        "SCALE_FREE": bool(task.scale_free),
    }


def update(like: Tensor, tasks: Iterable[Task], elements: int, calibrated: bool = False) -> None:
    """Finish the step after the base's step: compute variance, increment and λ, and set x to x +
    λ(x' − x). All parameters with the same options take one launch; four if λ is calibrated.
    """
    alike: dict[tuple[int, ...], list[Task]] = {}
    for task in tasks:
        key = task.increment, task.history, task.form, task.scale_free, bool(task.recent)
        alike.setdefault(key, []).append(task)
    for (increment, *_, scaled), some in alike.items():
        kind = {"INCREMENT": int(increment), **_kind(some[0])}
        if scaled:
            _update_calibrated(some, like, kind)
        else:
            Table(some, like).run(update_kernel, CALIBRATED=False, **kind)


def _update_calibrated(tasks: list[Task], like: Tensor, kind: dict[str, Any]) -> None:
    """Finish the step with calibrated λ: the mean of λ must be known before x changes."""
    blocks = sum(triton.cdiv(task.n, thresholds.TRITON_BLOCK) for task in tasks)
    sums = torch.empty((blocks, 2), dtype=torch.float64, device=like.device)
    for task in tasks:
        task.products = sums.data_ptr()
    table = Table(tasks, like)
    real = tl.float64 if like.dtype == torch.float64 else tl.float32

    def means(before: bool) -> None:
        sizes, block = (len(tasks), blocks), thresholds.TRITON_SUMS[1]
        grid, meta = (len(tasks),), {"BLOCK": block, "REAL": real, "BEFORE": before}
        launch(mean_kernel, grid, like, table.words, *sizes, **meta)

    table.run(update_kernel, CALIBRATED=True, **kind)
    means(before=True)
    table.run(calibrate_kernel, INCREMENT=kind["INCREMENT"])
    means(before=False)


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    task: Task,
) -> Tensor | None:
    """Record ρ in its history, and return λ; None where PyTorch is needed. `task` has the options
    of the regularizer.
    """
    tensors = (variance, delta, history, count, *(() if present is None else (present,)))
    if not serves(*tensors) or not delta.numel():
        return None
    lam = torch.empty_like(delta)
    task.n, task.lam = lam.numel(), lam.data_ptr()
    task.variance, task.delta = variance.data_ptr(), delta.data_ptr()
    task.rho_sum, task.rho_count = history.data_ptr(), count.data_ptr()
    task.square = None if present is None else present.data_ptr()
    Table([task], lam).run(lambda_kernel, MASKED=present is not None, **_kind(task))
    return lam


def variance(
    total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor
) -> bool:
    """Write (m·W − S²)·factor into `out`, and 0 where that is no more than rounding errors. Return
    False where PyTorch is needed.
    """
    if not serves(total, square, out) or not out.numel():
        return False
    task = Task(
        n=out.numel(),
        total=total.data_ptr(),
        square=square.data_ptr(),
        variance=out.data_ptr(),
        m=m,
        factor=factor,
        rounding=rounding,
    )
    Table([task], out).run(variance_kernel)
    return True


def compare(rows: Sequence[tuple[Tensor, ...]]) -> list[list[float]]:
    """Return S·S, g·S, g·g and ΣW of each (S, g, W). All of one type and device take two launches
    and one wait. `serves` must have accepted the tensors.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, (total, _, _) in enumerate(rows):
        alike.setdefault((total.dtype, total.device), []).append(i)
    out: list[list[float]] = [[]] * len(rows)
    for places in alike.values():
        tasks = []
        for i in places:
            total, grad, square = rows[i]
            task = Task(n=total.numel(), total=total.data_ptr(), square=square.data_ptr())
            task.grad = grad.data_ptr()
            tasks.append(task)
        like = rows[places[0]][0]
        blocks = sum(triton.cdiv(task.n, thresholds.TRITON_BLOCK) for task in tasks)
        sums = torch.empty((blocks + len(tasks), 4), dtype=torch.float64, device=like.device)
        for task in tasks:
            task.products = sums.data_ptr()
        table, ends = Table(tasks, like), sums[blocks:]
        table.run(compare_kernel)
        sizes, block = (len(tasks), sums, ends, blocks), thresholds.TRITON_SUMS[1]
        launch(add_up_kernel, (len(tasks),), like, table.words, *sizes, BLOCK=block)
        for i, products in zip(places, ends.tolist(), strict=True):
            out[i] = products
    return out
