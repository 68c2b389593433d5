"""The tasks of one native step, kept and used again in the next steps.

A step that native code takes whole needs a task for each parameter. From step to step only three
pointers in it change: S, W and the gradient are new tensors; for Adam also what depends on the
number of steps. `PreparedStep` looks whether all else is as it was: options, counts, and the
tensors of the state with their shapes and addresses. If anything is not, it takes no step, and
`native_step` fills new tasks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from varreg import _torch, native
from varreg.backends import BACKENDS
from varreg.engine import deferred, processes
from varreg.engine.ledger import Ledger
from varreg.engine.parameters import LEDGERS
from varreg.native.contract import Task
from varreg.optim.repeated_lambda import RepeatedLambda, change_counts
from varreg.optim.state import COUNT, STEPS
from varreg.optim.whole_step import STEP, SWITCHES, count_base_steps

if TYPE_CHECKING:
    from varreg.optim.base import Regularized
    from varreg.optim.parameter_step import ParameterStep
    from varreg.optim.step import Lambdas

Calls = list[tuple[torch.dtype, ctypes.Array[Task], int]]
"""The type, tasks and number of elements of each native call of a step."""
NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "eps")
OTHER_WAYS = ("foreach", "fused", "differentiable", "capturable", "calibrate")
_OPTIONS = tuple(dict.fromkeys((*NUMBERS, *SWITCHES, *OTHER_WAYS, "betas")))
"""The base's options on which a task depends. `_check_changed` watches ours."""


def _options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    values = tuple(map(group.get, _OPTIONS))
    return values, tuple(map(type, values))  # types, since 1 == True


class _Entry(NamedTuple):
    """One parameter: its task, and everything that the task was made of."""

    task: Task
    factor: float
    """The task's factor before the step, which multiplies it by κ²."""
    ledger: Ledger
    group: dict[str, Any]
    fill: Callable[..., None]
    """The `fill` of the increment's kernel."""
    moments: tuple[int, int, float]
    """m, K, and the ledger's rounding error of p.grad."""
    state: dict[str, Any]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    """The tensors in the state, and last the parameter: as long as they are kept, no other tensor
    has their ids.
    """
    ids: list[int]
    addresses: list[int]
    shapes: list[torch.Size]


class PreparedStep:
    """The tasks of a step in which native code took the whole step of every parameter that had a
    gradient.
    """

    def __init__(
        self, optimizer: Regularized, steps: Sequence[ParameterStep], calls: Calls, lambdas: Lambdas
    ):
        self.calls, self.lambdas = calls, lambdas
        self.checked, self.states = optimizer._checked, optimizer.state
        groups = optimizer.param_groups
        self.groups = [(_options(group), optimizer._increment(group)) for group in groups]
        tasks = [task for _, array, _ in calls for task in array]
        known = {id(s.parameter): _entry(s, task) for s, task in zip(steps, tasks, strict=True)}
        self.entries = [[known.get(id(p)) for p in group["params"]] for group in groups]

    def take(self, optimizer: Regularized) -> Lambdas | None:
        """Take the step. Return λ of each parameter whose step was taken, as `native_step` does;
        None if no step was taken, since new tasks are needed.
        """
        ready = self._ready(optimizer)
        if ready is None:
            return None
        for entry, S, W, grad in ready:
            task = entry.task
            task.total, task.square, task.grad = S.data_ptr(), W.data_ptr(), grad.data_ptr()
            task.factor, task.is_changed = entry.factor, 0
            if STEP in entry.state:
                entry.fill(task, entry.group, entry.state, False, True)
        for dtype, tasks, elements in self.calls:
            native.whole(tasks, dtype, elements)
        count_base_steps(entry.state for entry, *_ in ready if not entry.task.is_left)
        lambdas = self.lambdas
        for entry, *_ in ready:
            task, p = entry.task, entry.tensors[-1]
            if task.is_left or task.is_outgrown:
                lambdas = dict(lambdas) if lambdas is self.lambdas else lambdas
                last = lambdas.pop(p)
                if not task.is_left:
                    change_counts(entry.state, task)
                    if isinstance(last, RepeatedLambda):  # its last tensor is the count
                        last = last._replace(state=(*last.state[:-1], entry.state[COUNT]))
                    lambdas[p] = last
        return lambdas

    def _ready(self, optimizer: Regularized) -> list[tuple[_Entry, Tensor, Tensor, Tensor]] | None:
        """Return the entry of each parameter with S, W and the gradient; None if anything else has
        changed.
        """
        groups, states = optimizer.param_groups, optimizer.state
        if (
            self.checked is not optimizer._checked
            or self.states is not states
            or len(groups) != len(self.groups)
            or optimizer._replace_lambda is not None
            or BACKENDS["cpu"] is not native
            or deferred.PENDING
            or _torch.dispatch_modes()
            or processes.are_several()
        ):
            return None
        ready = []
        for group, (options, increment), entries in zip(
            groups, self.groups, self.entries, strict=True
        ):
            parameters = group["params"]
            if (
                len(parameters) != len(entries)
                or _options(group) != options
                or optimizer._increment(group) is not increment
            ):
                return None
            for p, ledger, entry in zip(parameters, LEDGERS.find(parameters), entries, strict=True):
                grad = p.grad
                if entry is None or grad is None:
                    if entry is None and grad is None:
                        continue
                    return None
                known, state = entry.ledger, entry.state
                m = known.read(p, stepping=True) if ledger is known else None
                if (
                    m is None
                    or known.is_float64
                    or (m.count, m.groups, known.precision) != entry.moments
                    or entry.tensors[-1] is not p
                    or states.get(p) is not state
                    or list(map(id, map(state.get, entry.names))) != entry.ids
                    or list(map(_ADDRESS, entry.tensors)) != entry.addresses
                    or list(map(_SHAPE, entry.tensors)) != entry.shapes
                    or not all(map(Tensor.is_contiguous, entry.tensors))
                    or not state[STEPS]  # the sums begin again
                ):
                    return None
                ready.append((entry, m.total, m.square, grad))
        for entry, *tensors in ready:
            if not native.serves(entry.tensors[-1], *tensors):
                return None
        return ready


_ADDRESS = Tensor.data_ptr
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def can_keep(steps: Sequence[ParameterStep]) -> bool:
    """Return whether the tasks of these steps hold for the next ones, too. In a parameter's first
    step its sums begin: that task has other factors.
    """
    return all(float(step.state[STEPS]) > 1 for step in steps)


def _entry(step: ParameterStep, task: Task) -> _Entry:
    m, ledger, state = step.measured, step.ledger, step.state
    kernel = step.increment.kernel
    assert ledger is not None
    assert kernel is not None
    names = tuple(name for name, value in state.items() if isinstance(value, Tensor))
    ours = tuple(state[name] for name in names)
    tensors = (*ours, step.parameter)
    factor = m.constants[0]
    moments = m.count, m.groups, ledger.precision
    known = list(map(id, ours)), list(map(_ADDRESS, tensors)), list(map(_SHAPE, tensors))
    how = ledger, step.group, kernel.fill
    return _Entry(task, factor, *how, moments, state, names, tensors, *known)
