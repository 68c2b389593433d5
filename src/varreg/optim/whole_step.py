"""The whole step in one pass over memory: native code takes torch's own step and scales it by λ.

Native code repeats the arithmetic of torch's SGD, Adam and AdamW, rounding by rounding; for square
roots it calls the function that torch itself calls. `repeats_torch` tries once whether that is true
of the installed torch on this processor. If it is not, and for other options and optimizers, torch
takes its own step, and step.py does the rest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from varreg import _torch, native
from varreg.native.contract import Task
from varreg.optim.increments import Kernel

_BASES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_TRIED = {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
SWITCHES = (
    *("maximize", "nesterov", "momentum", "dampening", "weight_decay"),
    *("decoupled_weight_decay", "amsgrad"),
)
"""Options that change the arithmetic of the step when they are switched on."""
STEP = "step"
"""The key of the base's own number of steps in the state. SGD has none."""


@contextlib.contextmanager
def without(groups: list[dict[str, Any]], taken: Mapping[Tensor, Any]) -> Iterator[None]:
    """Leave out of the param groups, inside the `with` block, parameters whose step is taken."""
    before = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, before, strict=True) if taken else ():
            group["params"] = [p for p in parameters if p not in taken]
        yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def unhooked(base: Any) -> Any:
    """Return the `step` of an optimizer class without hooks, which users register for all
    optimizers, and without profiling.
    """
    step = base.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def count_base_steps(states: Iterable[dict[str, Any]]) -> None:
    """Count the base's step in these states, if the base counts."""
    if counts := [state[STEP] for state in states if STEP in state]:
        _torch.foreach_add_into(counts, 1)


@functools.cache
def repeats_torch(base: Any, kernel: Kernel, dtype: torch.dtype, *switched_on: bool) -> bool:
    """Return whether native code takes the step of a torch optimizer, to the bit. `switched_on` has
    a flag for each option in `SWITCHES`. Return False if a user replaced the optimizer's `step`.
    """
    own = inspect.unwrap(base.step).__module__.startswith("torch.optim.")
    if base not in _BASES or not kernel.knows_base or not own:
        return False
    options = dict(zip(SWITCHES, switched_on, strict=True))
    known = inspect.signature(base).parameters
    chosen = {k: on and _TRIED.get(k, True) for k, on in options.items() if k in known}
    random = torch.Generator("cpu").manual_seed(0)  # whatever the default device is
    n = 1037  # many vectors of a processor, and some elements more
    p = torch.nn.Parameter(torch.randn(n, dtype=dtype, generator=random, device="cpu"))
    optimizer = base([p], lr=0.1, **chosen)
    group = {"decoupled_weight_decay": False, **optimizer.param_groups[0]}
    for turn in range(4):
        p.grad = torch.randn(n, dtype=dtype, generator=random, device="cpu")
        state = copy.deepcopy(optimizer.state[p])
        x = p.detach().clone()
        with torch.no_grad():
            unhooked(base)(optimizer)
        if turn and not _is_same(p, group, kernel, state, x, optimizer.state[p]):
            return False
    return True


def _is_same(
    p: Tensor,
    group: dict[str, Any],
    kernel: Kernel,
    state: dict[str, Any],
    x: Tensor,
    after: Mapping[str, Any],
) -> bool:
    """Return whether native code, from the same start, reaches torch's parameter and state."""
    assert p.grad is not None
    sums = "vr_variance", "vr_numerator", "vr_covariance", "vr_denominator"
    ours = {name: torch.ones_like(x) for name in (*sums, "rho", "count")}
    square, steps = p.grad.square(), torch.ones((), dtype=x.dtype, device="cpu")
    task = Task(n=x.numel(), increment=kernel.kind, m=2.0, factor=1.0, s=1.0, low=1.0, high=1.0)
    task.history, task.scale_free, task.lr, task.most = 1, 1, group["lr"], float("inf")
    task.total = task.grad = p.grad.data_ptr()
    task.square, task.x, task.steps = square.data_ptr(), x.data_ptr(), steps.data_ptr()
    task.rho_sum, task.rho_count = ours["rho"].data_ptr(), ours["count"].data_ptr()
    kernel.fill(task, group, {**state, **ours}, False, True)
    tasks = (Task * 1)(task)
    native.whole(tasks, x.dtype, x.numel())
    averages = [k for k, t in state.items() if isinstance(t, Tensor) and k != STEP]
    states = all(torch.equal(state[k], after[k]) for k in averages)
    return not tasks[0].is_left and states and torch.equal(x, p.detach())
