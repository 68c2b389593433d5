"""Divide steps into parts whose tensors fit the cache: slice large parameters, join small ones.

A part is itself a `ParameterStep`. Its tensors hold the elements of the part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.devices import has_float64
from varreg.engine.on_device import joined as joined_memory
from varreg.optim.increments import coupled_decay
from varreg.optim.state import HISTORY
from varreg.shards import is_sharded
from varreg.thresholds import (
    DEVICE_JOINED,
    DEVICE_LARGE,
    DEVICE_SMALL,
    LARGE_PARAMETER,
    SMALL_PARAMETER,
)

if TYPE_CHECKING:
    from varreg.optim.parameter_step import ParameterStep

ON_CPU = SMALL_PARAMETER, sys.maxsize, LARGE_PARAMETER
ON_DEVICE = DEVICE_SMALL, DEVICE_JOINED, DEVICE_LARGE
"""The largest size of a parameter that is joined, the largest size of joined parameters together,
and the size from which on a parameter is sliced, in elements.
"""


def set_lambdas(steps: Iterable[ParameterStep], work: Callable[[ParameterStep], Tensor]) -> None:
    """Set λ of each step. `work` returns λ of one part."""
    large, small = _by_size(steps)
    for step in large:
        lams = [work(part) for part in slices(step)]
        step.lam = lams[0] if len(lams) == 1 else torch.cat(lams).view_as(step.p)
    for alike in small:
        if len(alike) == 1:
            alike[0].lam = work(alike[0])
        else:
            joined = _join(alike)
            joined.lam = work(joined)
            _distribute(joined, alike)


def sums(
    steps: Iterable[ParameterStep], work: Callable[[ParameterStep], tuple[Tensor, ...]]
) -> list[Tensor]:
    """Return for each step the sums over its elements of the tensors that `work` returns for a
    part. No element of these tensors may be negative.
    """
    steps = list(steps)
    large, small = _by_size(steps)
    found: dict[int, Any] = {}
    for step in large:
        found[id(step)] = sum(row for part in slices(step) for row in _sums(work(part), None))
    for alike in small:
        joined = alike[0] if len(alike) == 1 else _join(alike)
        rows = _sums(work(joined), [step.p.numel() for step in alike])
        found.update(zip(map(id, alike), rows, strict=True))
        if joined is not alike[0]:
            _return_state(joined, alike)
    return [found[id(step)] for step in steps]


def _sums(tensors: Sequence[Tensor], sizes: list[int] | None) -> Sequence[Tensor]:
    """Return a row for each size: the sums of a piece of that size of each tensor."""
    wide = torch.float64 if has_float64(tensors[0].device) else None
    flat = [t.reshape(-1) for t in tensors]
    pieces = flat if sizes is None else [piece for t in flat for piece in t.split(sizes)]
    norms = torch.stack(list(_torch.foreach_norm(pieces, 1, wide))).to(tensors[0].dtype)
    return norms.view(len(flat), -1).unbind(1)


def _by_size(
    steps: Iterable[ParameterStep],
) -> tuple[list[ParameterStep], list[list[ParameterStep]]]:
    """Return the steps of large parameters, and lists of the others, each to be joined."""
    large: list[ParameterStep] = []
    small: dict[tuple[Any, ...], list[ParameterStep]] = {}
    for step in steps:
        if step.p.dim() > 0 and step.p.numel() <= _sizes(step)[0]:
            small.setdefault(_kind(step), []).append(step)
        else:
            large.append(step)
    return large, [part for alike in small.values() for part in _of_good_size(alike)]


def _sizes(step: ParameterStep) -> tuple[int, int, int]:
    return ON_DEVICE if not step.p.is_cpu else ON_CPU


def _of_good_size(steps: list[ParameterStep]) -> Iterator[list[ParameterStep]]:
    """Yield lists of steps to join, each with a limited number of elements. On the CPU, joined
    steps have the same κ². On a device κ² may differ, so that few kernels serve all steps.
    """
    most, elements = _sizes(steps[0])[1], 0
    together: list[ParameterStep] = []
    for step in steps:
        if together and elements + step.p.numel() > most:
            yield together
            together, elements = [], 0
        together.append(step)
        elements += step.p.numel()
    yield together


def slices(step: ParameterStep) -> Iterator[ParameterStep]:
    """Yield the slices of a step; yield the step itself if it is small, or if its tensors have
    different strides.
    """
    m, names, n, large = step.measured, _names(step), step.p.numel(), _sizes(step)[2]
    tensors = [step.x, step.grad, m.total, m.square, *(step[name] for name in names)]
    if isinstance(step.kappa2, Tensor):
        tensors.append(step.kappa2)
    # a slice must have the same elements in all tensors
    if n <= large or not all(t.is_contiguous() for t in tensors):
        yield step
        return
    for i in range(0, n, large):
        yield _cut(step, slice(i, i + large), names)


def _names(step: ParameterStep) -> list[str]:
    """Return the names of the entries of the state that a part needs, each of the parameter's
    shape.
    """
    names = (*step.increment.reads, *step.increment.sums, *HISTORY)
    return [name for name in names if step.state[name].dim()]


def _cut(step: ParameterStep, span: slice, names: list[str]) -> ParameterStep:
    """Return the step of a range of a parameter's elements. Its tensors are views of the
    parameter's.
    """
    m = step.measured
    total, square = m.total.view(-1)[span], m.square.view(-1)[span]
    return replace(
        step,
        moments=replace(m, total=total, square=square),
        state={**step.state, **{name: step[name].view(-1)[span] for name in names}},
        grad=step.grad.view(-1)[span],
        x=step.x.view(-1)[span],
        kappa2=step.kappa2.view(-1)[span] if isinstance(step.kappa2, Tensor) else step.kappa2,
    )


def _kind(step: ParameterStep) -> tuple[Any, ...]:
    """Return a key. Parameters with equal keys can be joined."""
    m, state = step.measured, step.state
    # numbers in the base's state: its count of steps, and NAdam's product of momenta
    numbers = tuple(
        step.t if key == "step" else float(value)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 0 and not key.startswith("vr_")
    )
    # on a device, κ² of each is joined with the rest
    by_element = isinstance(step.kappa2, Tensor) or not step.p.is_cpu
    kappa2 = None if by_element else step.kappa2
    types = m.total.device, m.square.dtype, step.p.dtype
    return id(step.group), m.count, m.groups, *types, step.first, kappa2, numbers


def _join(steps: list[ParameterStep]) -> ParameterStep:
    """Return one step with the elements of all steps, one parameter after the other, in new
    memory.
    """
    lead = steps[0]

    def join(tensors: list[Any]) -> Tensor:
        adjacent = None if tensors[0].is_cpu else joined_memory(tensors)
        return torch.cat([t.reshape(-1) for t in tensors]) if adjacent is None else adjacent

    moments = replace(
        lead.measured,
        total=join([step.measured.total for step in steps]),
        square=join([step.measured.square for step in steps]),
    )
    joined = {name: join([step[name] for step in steps]) for name in _names(lead)}
    untouched = all(step.grad is step.measured.total for step in steps)
    return replace(
        lead,
        moments=moments,
        state={**lead.state, **joined},
        grad=moments.total if untouched else join([step.grad for step in steps]),
        # only weight decay needs the values of parameters
        x=join([step.x for step in steps]) if coupled_decay(lead.group) else lead.x,
        kappa2=_joined_kappa2(steps),
    )


def _joined_kappa2(steps: list[ParameterStep]) -> Tensor | float:
    """Return κ² of all elements; a number if it is the same for all."""
    first = steps[0].kappa2
    if all(not isinstance(step.kappa2, Tensor) and step.kappa2 == first for step in steps):
        return first
    like = steps[0].measured.square
    numbers = [0.0 if isinstance(step.kappa2, Tensor) else step.kappa2 for step in steps]
    # one transfer for all numbers, without waiting
    on_device = torch.tensor(numbers, dtype=like.dtype, device="cpu").to(
        like.device, non_blocking=True
    )
    each = [
        step.kappa2.reshape(-1)
        if isinstance(step.kappa2, Tensor)
        else number.expand(step.p.numel())
        for step, number in zip(steps, on_device, strict=True)
    ]
    return torch.cat(each)


def _distribute(joined: ParameterStep, steps: list[ParameterStep]) -> None:
    """Set λ of the steps, and copy the joined statistics back to their states."""
    sizes = [step.p.numel() for step in steps]
    for step, lam in zip(steps, joined.lam.split(sizes), strict=True):
        step.lam = lam.view(step.p.shape)
    _return_state(joined, steps)


def _return_state(joined: ParameterStep, steps: list[ParameterStep]) -> None:
    """Copy the joined statistics back to the states of the steps."""
    sizes = [step.p.numel() for step in steps]
    for name in _names(joined):
        here = [step[name] for step in steps]
        block = joined.state[name]
        if block.data_ptr() == here[0].data_ptr():
            continue  # it is the same memory
        shaped = [t.view(p.shape) for t, p in zip(block.split(sizes), here, strict=True)]
        if block.is_cpu or any(is_sharded(step.state[name]) for step in steps):
            if name not in joined.increment.reads:  # those entries are the base's: only read
                _torch.foreach_copy(here, shaped)
        else:  # from now on the entries are adjacent in memory, and need not be joined again
            for step, t in zip(steps, shaped, strict=True):
                step.state[name] = t.data
