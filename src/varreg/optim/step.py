"""Finish a step after the base's own step: move each parameter to x + λ·(x' − x).

There are two implementations, with the same arguments and the same result. `torch_step` is the
definition: it is written in PyTorch and knows all options. `native_step` calls kernels that need
one pass over memory. It knows the usual options and gives the same numbers up to rounding. For some
parameters it can take the base's step, too. `choose` decides which of the two takes a step, and
`reconsider` decides again if the gradient was changed after it was measured.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch, native
from varreg.backends import BACKENDS
from varreg.engine import Moments, deferred, processes
from varreg.memory import empty_like
from varreg.native.contract import Counts, Task
from varreg.optim.calibrate import calibrate
from varreg.optim.gradient import largest_sum, rounding_of
from varreg.optim.parameter_step import ParameterStep
from varreg.optim.prepare import needed, prepare
from varreg.optim.prepared import NUMBERS, OTHER_WAYS, Calls
from varreg.optim.repeated_lambda import RepeatedLambda, bits, change_counts
from varreg.optim.scopes import SCOPES
from varreg.optim.state import (
    CALIBRATION,
    COUNT,
    HISTORY,
    NARROW,
    STEPS,
    compact_count,
    expand_count,
)
from varreg.optim.whole_step import SWITCHES, count_base_steps, repeats_torch
from varreg.regularizer import KERNEL_OPTIONS, kernel_task, limit

if TYPE_CHECKING:
    from varreg.optim.base import Regularized

Lambdas = dict[Tensor, Tensor | RepeatedLambda]
"""λ of each parameter; a `RepeatedLambda` computes λ when it is read."""

_KIND = attrgetter("parameter.dtype", "parameter.device")


def choose(optimizer: Regularized, steps: list[ParameterStep]) -> None:
    """Set `native` and `with_base_step` of each step: whether native code knows its options and can
    use its tensors.
    """
    known: dict[int, bool] = {}  # by group: True if native code knows its options
    for step in steps if optimizer._replace_lambda is None else ():
        m, state, group, increment = step.moments, step.state, step.group, step.increment
        if id(group) not in known:
            known[id(group)] = (
                increment.kernel is not None
                and SCOPES[group["per"]].has_kernel
                and kernel_task(*KERNEL_OPTIONS(group)) is not None
            )
        if known[id(group)] and m is not None:
            needs = (*increment.reads, *increment.sums, *HISTORY)
            count = state.get(COUNT)
            if count is not None and (not count.dim() or count.dtype == NARROW):
                needs = needs[:-1]  # it is not like the parameter
            # entries that the state does not have yet will be created like the parameter
            present = map(state.__getitem__, filter(state.__contains__, needs))
            kernels = BACKENDS[step.parameter.device.type]
            step.native = kernels.serves(step.parameter, step.grad, m.total, m.square, *present)
    if _can_take_base_steps(optimizer, steps):
        for step in steps:
            step.with_base_step = True


def _can_take_base_steps(optimizer: Regularized, steps: list[ParameterStep]) -> bool:
    """Return whether native code can take the base's step of all parameters, too.

    It takes the base's step of all parameters or of none: if it cannot take one of them, that one
    may raise an error later, and until then no parameter may move.
    """
    if not optimizer._groups_fixed or deferred.PENDING or processes.are_several():
        return False
    base: Any = optimizer._base
    known: dict[int, bool] = {}  # by group: True if native code knows the base with its options
    for step in steps:
        m, group, state, ledger = step.moments, step.group, step.state, step.ledger
        if not step.native or m is None or m.groups < 2 or ledger is None or ledger.is_float64:
            return False
        if BACKENDS[step.parameter.device.type] is not native:
            return False  # only the C library has whole steps
        if id(group) not in known:
            kernel, betas = step.increment.kernel, group.get("betas", (1.0,))
            types = {*map(type, map(group.get, NUMBERS)), *map(type, betas)}
            known[id(group)] = (
                types <= {float, int, type(None)}  # no tensors
                and betas[0] > 0.5  # for smaller values, torch uses another formula
                and not any(map(group.get, OTHER_WAYS))
                and kernel is not None
                and repeats_torch(
                    base, kernel, step.parameter.dtype, *map(bool, map(group.get, SWITCHES))
                )
            )
        wanted = needed((*step.increment.reads, *step.increment.sums), False)
        if not known[id(group)] or not state.keys() >= wanted.keys():
            return False
        if state[STEPS].dtype != m.square.dtype:
            return False
    return True


def reconsider(step: ParameterStep) -> None:
    """Let PyTorch take the step if each element has its own κ²: kernels know one κ² for all."""
    if isinstance(step.kappa2, Tensor):
        step.native = False


def take_steps(optimizer: Regularized, steps: list[ParameterStep]) -> Lambdas:
    """Scale the change that the base made to each parameter by λ. Return λ of each parameter."""
    for step in steps:  # all steps, since distributed checkpoints need the state of all parameters
        m, count = step.moments, step.state.get(STEPS)
        names = needed(step.increment.sums, step.group["calibrate"])
        ready = m is not None and count is not None and count.dtype == m.square.dtype
        if step.ledger is not None and not (ready and step.state.keys() >= names.keys()):
            prepare(optimizer, step)
    steps = [step for step in steps if step.regularized]
    lambdas: Lambdas = {}
    if by_native := [step for step in steps if step.native]:
        lambdas |= native_step(optimizer, by_native)
    if by_torch := [step for step in steps if not step.native]:
        lambdas |= torch_step(optimizer, by_torch)
    return lambdas


def torch_step(optimizer: Regularized, steps: list[ParameterStep]) -> Lambdas:
    """Set λ of each step, and move each parameter to x + λ·(x' − x), by PyTorch. Return λ of each
    parameter.
    """
    for step in steps:
        expand_count(step.state)
        step.first = float(step.state[STEPS].add_(1)) == 1
    for name, scope in SCOPES.items():
        if alike := [step for step in steps if step.group["per"] == name]:
            scope.regularize(optimizer, alike)
    by_group: dict[tuple[Any, ...], list[ParameterStep]] = {}
    for step in steps:
        if step.group["calibrate"]:
            recent = step.state[CALIBRATION[0]]
            by_group.setdefault((id(step.group), recent.dtype, recent.device), []).append(step)
    for alike in by_group.values():
        calibrate(alike)
    if optimizer._replace_lambda is not None:
        optimizer._replace_lambda(steps)
    steps = [step for step in steps if step.p.numel()]  # a shard may be empty
    _move(steps, optimizer._scales_decay)
    return {step.parameter: step.lam for step in steps}


def _move(steps: list[ParameterStep], scales_decay: bool) -> None:
    """Set each parameter to x + λ·(x' − x). Decoupled weight decay is not part of the increment, so
    it is applied to x before.
    """
    by_group: dict[tuple[int, torch.dtype, torch.device], list[ParameterStep]] = {}
    for step in steps:
        key = id(step.group), step.lam.dtype, step.p.device
        by_group.setdefault(key, []).append(step)
    for (_, dtype, _), alike in by_group.items():
        group, parameters = alike[0].group, [step.p for step in alike]
        x = [step.x for step in alike]
        if group.get("decoupled_weight_decay") and not scales_decay:
            _torch.foreach_mul_into(x, 1 - float(group["lr"]) * float(group["weight_decay"]))
        x = [t.to(dtype) for t in x]
        # a single λ for a tensor is a scalar
        lams = [step.lam.expand(step.p.shape) for step in alike]
        _torch.foreach_lerp_into(x, [p.to(dtype) for p in parameters], lams)
        _torch.foreach_copy(parameters, x)


def native_step(optimizer: Regularized, steps: list[ParameterStep]) -> Lambdas:
    """Take `native_calls`. Return λ of each parameter."""
    return native_calls(optimizer, steps)[0]


def native_calls(optimizer: Regularized, steps: list[ParameterStep]) -> tuple[Lambdas, Calls]:
    """Set λ of each step, and move each parameter to x + λ·(x' − x), by native code. Return λ of
    each parameter, and the calls: one for all parameters of one precision and device.

    Steps `with_base_step` have not had the base's step: native code takes that, too. Only while it
    runs does it find that a gradient was changed after `backward()`, and is no multiple of the
    measured one. It then leaves out that parameter: the parameter and its state do not change, and
    the result has no λ for it.
    """
    lambdas, calls = Lambdas(), Calls()
    for (dtype, device), consecutive in groupby(steps, _KIND):
        alike = list(consecutive)
        tasks, elements, any_calibrated = _tasks(optimizer, alike)
        calls.append((dtype, tasks, elements))
        if alike[0].with_base_step:
            native.whole(tasks, dtype, elements)
            count_base_steps(s.state for s, t in zip(alike, tasks, strict=True) if not t.is_left)
        else:
            p, kernels = alike[0].parameter, BACKENDS[device.type]
            kernels.update(p, tasks, elements, any_calibrated)
        for step, task in zip(alike, tasks, strict=True):
            if task.is_left:
                step.with_base_step = False  # the base takes it, and then the step is judged
                continue
            if task.is_outgrown:
                change_counts(step.state, task)
            if step.absent is None:
                lambdas[step.parameter] = step.lam
            else:
                used = (*step.increment.reads, *step.increment.sums, *HISTORY)
                pointed_to = tuple(map(step.state.__getitem__, used))
                lambdas[step.parameter] = RepeatedLambda(task, pointed_to, step.absent)
    return lambdas, calls


def _tasks(optimizer: Regularized, steps: list[ParameterStep]) -> tuple[Any, int, bool]:
    """Return the tasks of these steps, the number of elements of all of them, and whether λ of any
    is calibrated. The parameters have one precision and device.
    """
    tasks = (Task * len(steps))()
    templates: dict[tuple[int, int, int], Task] = {}
    elements, any_calibrated = 0, False
    dtype, device = _KIND(steps[0])
    for i, step in enumerate(steps):
        p, m, group, state = step.parameter, step.moments, step.group, step.state
        kernel = step.increment.kernel
        assert m is not None
        assert kernel is not None
        key = id(group), m.count, m.groups
        if (template := templates.get(key)) is None:
            template = templates[key] = _template(m, group, kernel.kind)
        tasks[i] = template
        task = tasks[i]
        task.n = n = p.numel()
        elements += n
        task.factor *= step.kappa2
        task.total, task.square = m.total.data_ptr(), m.square.data_ptr()
        task.grad, task.x = step.grad.data_ptr(), p.data_ptr()
        is_native, last = BACKENDS[device.type] is native, optimizer._lambdas.get(p)
        number = state[COUNT]
        if not is_native:
            expand_count(state)
        elif number.dim() and number.dtype != NARROW:  # it is as PyTorch has it
            compact_count(state, kernel.shares_count, is_new=last is None)
        history, number = state["vr_history"], state[COUNT]
        task.rho_sum, task.rho_count = history.data_ptr(), number.data_ptr()
        # the count of a parameter that is one number is shared, too
        task.counts = Counts.NARROW if number.dtype == NARROW else int(not number.dim())
        if is_native and kernel.can_repeat:
            is_same = isinstance(last, RepeatedLambda) and last.task.n == n
            step.absent = last.absent if is_same else bits(n)  # type: ignore[union-attr]
            task.absent = step.absent.data_ptr()
        count = state[STEPS]
        is_first = count.item() == 0
        if count.device == device:
            task.steps = count.data_ptr()
        else:
            count.add_(1)  # it is on the CPU, where a device's kernel cannot count
        kernel.fill(task, group, state, is_first, step.with_base_step)
        if step.with_base_step:
            assert step.ledger is not None
            task.most = largest_sum(dtype)
            task.precision = max(rounding_of(dtype), step.ledger.precision)
        if group["calibrate"]:
            any_calibrated = True
            task.recent, task.spent, task.times = (state[k].data_ptr() for k in CALIBRATION)
        if group["calibrate"] or step.absent is None:
            step.lam = _memory_for_lambda(optimizer, p)
            task.lam = step.lam.data_ptr()
    return tasks, elements, any_calibrated


def _memory_for_lambda(optimizer: Regularized, p: Tensor) -> Tensor:
    """Return a contiguous tensor of a parameter's shape: that of the last step's λ, if there is
    one.
    """
    lam = optimizer._lambdas.get(p)
    if isinstance(lam, Tensor) and lam.shape == p.shape and lam.dtype == p.dtype:
        return lam if lam.is_contiguous() else empty_like(p)
    return empty_like(p)


def _template(m: Moments, group: dict[str, Any], kind: int) -> Task:
    """Return a task with the fields that all parameters of a group have in common."""
    options = kernel_task(*KERNEL_OPTIONS(group))
    assert options is not None
    task = Task.from_buffer_copy(options)
    task.increment, task.m, task.lr = kind, m.count, float(group["lr"])
    task.factor, task.rounding = m.constants
    if group["cap"] is not None:
        task.limit = limit(m.count, group)
    return task
