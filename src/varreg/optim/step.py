"""Finish a step after the base's own step: move each parameter to x + λ·(x' − x).

There are two implementations. `torch_step` is the definition: it is written in PyTorch and knows
all options. `native_step` calls kernels that need one pass over memory. It knows the usual options
and gives the same numbers up to rounding. `choose_native` decides which of the two moves a
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch, native
from varreg.backends import BACKENDS
from varreg.engine import Moments
from varreg.engine.ledger import Ledger
from varreg.memory import scratch
from varreg.native.contract import Task
from varreg.optim.calibrate import calibrate
from varreg.optim.gradient import largest_sum, rounding_of
from varreg.optim.increments import Increment, coupled_decay
from varreg.optim.prepare import needed, prepare
from varreg.optim.repeated_lambda import RepeatedLambda, split_count
from varreg.optim.scopes import SCOPES
from varreg.optim.state import CALIBRATION, COUNT, HISTORY, STEPS, expand_count, share_count
from varreg.regularizer import KERNEL_OPTIONS, kernel_task, limit
from varreg.shards import local

if TYPE_CHECKING:
    from varreg.optim.base import Regularized


_KIND = attrgetter("parameter.dtype", "parameter.device")


@dataclass(slots=True)
class ParameterStep:
    """The step of one parameter that has a gradient and is in a group with s > 0. In parts.py it
    may also be the step of some elements of a parameter, or of several small parameters.
    """

    parameter: Tensor
    """The parameter in the optimizer's param group."""
    group: dict[str, Any]
    increment: Increment
    ledger: Ledger | None
    moments: Moments | None
    """The measured moments; None if nothing was measured."""
    state: dict[str, Any]
    grad: Tensor
    """The gradient as the base sees it; a copy if the base may change the gradient."""
    native: bool = False
    """Whether native code takes the step."""
    products: Sequence[float] | None = None
    """S·S, g·S, g·g and ΣW, summed over all shards; None if they are not known."""
    base_steps: float | None = None
    """The base's number of steps, including this one, if the base counts them on a device."""
    regularized: bool = False
    """Whether λ scales this step. If not, the base's own step stays as it is."""
    kappa2: Tensor | float = 1.0
    """κ²: the variance of the gradient that the base sees is κ²v²."""
    p: Tensor = None  # type: ignore[assignment]
    """The elements of the parameter that this process holds: all of them, or a shard."""
    x: Tensor = None  # type: ignore[assignment]
    """A copy of `p` from before the step. Native code does not need it."""
    first: bool = True
    """Whether the sums for the increment's variance are new, and therefore 0."""
    g: Tensor = None  # type: ignore[assignment]
    """The gradient as the base uses it, with its sign and coupled weight decay."""
    s2: Tensor = None  # type: ignore[assignment]
    """σ², the variance of `g`."""
    lam: Tensor = None  # type: ignore[assignment]
    """λ, as soon as it is computed."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the state's entry of that name; for a sharded parameter, this process's shard."""
        return local(self.state[name])

    @property
    def t(self) -> float:
        """Return the base's number of steps, including this one."""
        return float(self.state["step"]) if self.base_steps is None else self.base_steps

    @property
    def measured(self) -> Moments:
        """Return the moments of a step that is regularized."""
        assert self.moments is not None
        return self.moments

    def increment_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return δ̄ and its variance, and update the sums that the variance needs."""
        m, group = self.measured, self.group
        # without the loss's reduction: the increment needs the variance of the gradient S itself
        m = Moments(m.count, m.groups, m.total, m.square)
        self.s2 = m.variance_into(scratch("variance", m.total.shape, m.total))
        if isinstance(self.kappa2, Tensor) or self.kappa2 != 1:
            self.s2.mul_(self.kappa2)
        self.g = -self.grad if group.get("maximize") else self.grad
        if decay := coupled_decay(group):
            self.g = self.g.add(self.x, alpha=decay)
        return self.increment.variance(self)


def choose_native(optimizer: Regularized, steps: list[ParameterStep]) -> None:
    """Set `native` of each step: whether native code knows its options and can use its tensors."""
    known: dict[int, bool] = {}  # by group: True if native code knows its options
    for step in steps if optimizer._replace_lambda is None else ():
        m, state, group, increment = step.moments, step.state, step.group, step.increment
        if id(group) not in known:
            known[id(group)] = (
                increment.kernel is not None
                and group["per"] == "element"
                and kernel_task(*KERNEL_OPTIONS(group)) is not None
            )
        if known[id(group)] and m is not None:
            needs = (*increment.reads, *increment.sums, *HISTORY)
            count = state.get(COUNT)
            if count is not None and not count.dim():
                needs = needs[:-1]  # one count for all elements
            # entries that the state does not have yet will be created like the parameter
            present = map(state.__getitem__, filter(state.__contains__, needs))
            kernels = BACKENDS[step.parameter.device.type]
            step.native = kernels.serves(step.parameter, step.grad, m.total, m.square, *present)


def take_steps(
    optimizer: Regularized, steps: list[ParameterStep]
) -> dict[Tensor, Tensor | RepeatedLambda]:
    """Scale the change that the base made to each parameter by λ. Return λ of each parameter, or a
    `RepeatedLambda`, which computes λ when it is read.
    """
    for step in steps:  # all steps, since distributed checkpoints need the state of all parameters
        m, count = step.moments, step.state.get(STEPS)
        names = needed(step.increment.sums, step.group["calibrate"])
        ready = m is not None and count is not None and count.dtype == m.square.dtype
        if step.ledger is not None and not (ready and step.state.keys() >= names.keys()):
            prepare(optimizer, step)
    steps = [step for step in steps if step.regularized]
    lambdas: dict[Tensor, Tensor | RepeatedLambda] = {}
    if by_native := [step for step in steps if step.native]:
        native_step(optimizer, by_native, lambdas)
    if by_torch := [step for step in steps if not step.native]:
        torch_step(optimizer, by_torch)
        lambdas.update({step.parameter: step.lam for step in by_torch if step.lam is not None})
    return lambdas


def torch_step(optimizer: Regularized, steps: list[ParameterStep]) -> None:
    """Set λ of each step, and move each parameter to x + λ·(x' − x), by PyTorch."""
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
    _move([step for step in steps if step.p.numel()], optimizer._scales_decay)
    for step in steps:
        if not step.p.numel():  # a shard may be empty
            step.lam = None  # type: ignore[assignment]


def _move(steps: list[ParameterStep], scales_decay: bool) -> None:
    """Set each parameter to x + λ·(x' − x). Decoupled weight decay is not part of the increment, so
    it is applied to x before.
    """
    by_group: dict[tuple[int, torch.dtype, torch.device], list[ParameterStep]] = {}
    for step in steps:
        key = id(step.group), step.lam.dtype, step.p.device
        by_group.setdefault(key, []).append(step)
    for (_, dtype, _), alike in by_group.items():
        group, there = alike[0].group, [step.p for step in alike]
        x = [step.x for step in alike]
        if group.get("decoupled_weight_decay") and not scales_decay:
            _torch.foreach_mul_into(x, 1 - float(group["lr"]) * float(group["weight_decay"]))
        x = [t.to(dtype) for t in x]
        # a single λ for a tensor is a scalar
        lams = [step.lam.expand(step.p.shape) for step in alike]
        _torch.foreach_lerp_into(x, [p.to(dtype) for p in there], lams)
        _torch.foreach_copy(there, x)


def native_step(
    optimizer: Regularized,
    steps: list[ParameterStep],
    lambdas: dict[Tensor, Tensor | RepeatedLambda],
    whole: bool = False,
) -> None:
    """Do the same by native code, in one call for all parameters of one precision and device. Write
    λ of each parameter to `lambdas`, or a `RepeatedLambda`.

    With `whole`, native code takes the base's step, too. It skips a parameter whose gradient is
    neither the measured one nor a multiple of it: the parameter does not change, and `lambdas` gets
    no entry for it.
    """
    for (dtype, device), consecutive in groupby(steps, _KIND):
        alike = list(consecutive)
        tasks = (Task * len(alike))()
        templates: dict[tuple[int, int, int], Task] = {}
        elements, any_calibrated = 0, False
        kernels = BACKENDS[device.type]
        for i, step in enumerate(alike):
            p, m, group, state = step.parameter, step.moments, step.group, step.state
            assert m is not None
            kernel = step.increment.kernel
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
            may_share = kernels is native and kernel.can_repeat
            if not may_share:
                expand_count(state)
            elif p not in optimizer._lambdas:  # the first step, or the first after a checkpoint
                share_count(state)
            history, number = state["vr_history"], state[COUNT]
            task.is_shared = is_shared = may_share and not number.dim()
            task.rho_sum, task.rho_count = history.data_ptr(), number.data_ptr()
            count = state[STEPS]
            is_first = count.item() == 0
            if count.device == device:
                task.steps = count.data_ptr()
            else:
                count.add_(1)  # it is on the CPU, where a device's kernel cannot count
            kernel.fill(task, group, state, is_first)
            if whole:
                assert step.ledger is not None
                task.most = largest_sum(dtype)
                task.precision = max(rounding_of(dtype), step.ledger.precision)
            if group["calibrate"]:
                any_calibrated = True
                task.recent, task.spent, task.times = (state[k].data_ptr() for k in CALIBRATION)
            elif is_shared:
                continue
            lam = optimizer._lambdas.get(p)  # reuse the memory of the last step's λ
            if not (isinstance(lam, Tensor) and lam.shape == p.shape and lam.dtype == dtype):
                lam = torch.empty_like(p)
            step.lam = lam = lam if lam.is_contiguous() else torch.empty_like(p)
            task.lam = lam.data_ptr()
        if whole:
            native.whole(tasks, dtype, elements)
        else:
            kernels.update(alike[0].parameter, tasks, elements, any_calibrated)
        for step, task in zip(alike, tasks, strict=True):
            if task.is_left:
                continue
            state = step.state
            if task.is_partial:
                split_count(step, task)
            if task.is_partial or not task.is_shared:
                lambdas[step.parameter] = step.lam
            else:
                used = (*step.increment.reads, *step.increment.sums, *HISTORY)
                lambdas[step.parameter] = RepeatedLambda(task, tuple(map(state.__getitem__, used)))


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
