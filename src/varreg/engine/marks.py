"""Marks: what the running forward knows about a tensor.

A mark says where the tensor carries the batch, or that it is made of parameters alone. Marks belong
to the running forward of a thread: `RUNNING` has its number, and each mark has the number of the
forward that made it. A mark of another forward means nothing. If observed models are nested, marks
belong to the forward of the outermost one. Inputs and outputs lose their marks when that forward
ends.

A mark is an attribute of the tensor, and not an entry in a table of the forward, for three reasons.
A table by id must keep every intermediate tensor alive, since Python reuses ids. A table of weak
references loses tensors that only the autograd graph holds for a while, and that return to Python
later as the same tensor. And an attribute is the cheapest to look up: every call of a torch
function in a forward looks up the marks of all its tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from varreg.engine.trace.layout import (
    Layout,
    Lost,
    Owners,
    Ragged,
    Single,
    Summed,
    Where,
    only_sample,
)
from varreg.thresholds import LAYOUTS

MARK = "_varreg_where"
"""The attribute of a tensor that holds its mark: (number of the forward, payload)."""


class Derived:
    """The mark of a tensor that is made of parameters alone."""


DERIVED = Derived()
_layout = functools.lru_cache(maxsize=LAYOUTS)(Layout)
_numbers = itertools.count(1)


class Running(threading.local):
    """The number of the running forward in this thread."""

    number = 0


RUNNING = Running()

# A payload has only plain numbers, strings and tensors, so that a marked tensor can be saved, and
# loaded without varreg. Its length tells its kind. `Single` and `Summed` (see `mark_of`) have
# length 1, and so has `CONSTANT`, which is recognised by identity.
_DERIVED, _SINGLE, _LOST, _RAGGED, _LAYOUT, _UNSEEN = 0, 1, 2, 3, 4, 5


def begin_forward() -> None:
    """Begin a new forward in this thread: earlier marks lose their meaning."""
    RUNNING.number = next(_numbers)


@contextlib.contextmanager
def marks_of_forward(number: int) -> Iterator[None]:
    """Make the marks of an earlier forward valid again: a checkpoint runs a part of it."""
    before, RUNNING.number = RUNNING.number, number
    try:
        yield
    finally:
        RUNNING.number = before


@contextlib.contextmanager
def with_marks(marks: Iterable[tuple[Tensor, Where | Derived]]) -> Iterator[None]:
    """Mark tensors inside of the `with` block, and restore their earlier marks afterwards."""
    before = []
    for t, where in marks:
        before.append((t, t.__dict__.get(MARK)))
        mark(t, where)
    try:
        yield
    finally:
        for t, found in before:
            t.__dict__.pop(MARK, None)
            if found is not None:
                t.__dict__[MARK] = found


def payload_of(t: Tensor) -> tuple[Any, ...] | None:
    """Return the payload of a tensor's mark in this forward; None without one."""
    found = t.__dict__.get(MARK)
    return None if found is None or found[0] != RUNNING.number or found[1] is CONSTANT else found[1]


def mark_of(t: Tensor) -> Where | Derived | None:
    """Return the mark that a tensor has in this forward; None without one."""
    payload = payload_of(t)
    if payload is None:
        return None
    kind = len(payload)
    if kind in (_LAYOUT, _UNSEEN):
        return _layout(*payload[:_LAYOUT])
    if kind == _LOST:
        return Lost(*payload)
    if kind == _RAGGED:
        return Ragged(payload[0], payload[1], Owners(payload[2]))
    if kind == _SINGLE:  # one entry is a pair: a sample, or a sum over all of them
        batch, sample = payload[0]
        return Summed(batch) if sample is None else Single(batch, sample)
    return DERIVED


def is_unseen(t: Tensor) -> bool:
    """Return whether the tensor had no grad_fn when it was marked and has one now: an operation
    that the tracer did not see gave it one.

    Two operations of torch do so, too, and do not count. A re-entrant checkpoint runs its forward
    again, under the tracer. The function that torch puts around a module with backward hooks
    changes no values, and the hooks are tried (`trace/gradient_hooks.py`).
    """
    payload = payload_of(t)
    if payload is None or len(payload) != _UNSEEN or t.grad_fn is None:
        return False
    return t.grad_fn.name() not in ("CheckpointFunctionBackward", "BackwardHookFunctionBackward")


def mark(t: Tensor, where: Where | Derived) -> None:
    """Mark a tensor."""
    if isinstance(where, Layout) and where.batch == 1:  # a reshape may have moved the dimension
        where = only_sample(t)
    t.__dict__[MARK] = (RUNNING.number, _payload(t, where))


def _payload(t: Tensor, where: Where | Derived) -> tuple[Any, ...]:
    if isinstance(where, Layout):
        # a view that was made while gradients were off may require a gradient, and still has no
        # node
        if t.is_floating_point() and not torch.is_grad_enabled() and t.grad_fn is None:
            # one more entry, for `is_unseen`: it had no gradient when it was marked
            return (*where, True)
        return tuple(where)
    if isinstance(where, Lost):
        return tuple(where)
    if isinstance(where, Ragged):
        return (where.batch, where.dim, where.owners.of)
    if isinstance(where, Single):
        return (tuple(where),)
    if isinstance(where, Summed):
        return ((where.batch, None),)
    return ()


CONSTANT = (None,)  # the payload of a tensor that the tracer saw made of constants alone


def mark_constant(t: Tensor) -> None:
    """Mark a tensor that is made of constants alone, as the tracer saw."""
    t.__dict__[MARK] = (RUNNING.number, CONSTANT)


def is_constant(t: Tensor) -> bool:
    """Return whether the tracer saw that a tensor is made of constants alone."""
    found = t.__dict__.get(MARK)
    return found is not None and found[0] == RUNNING.number and found[1] is CONSTANT


def unmark(t: Tensor) -> None:
    """Remove the mark of a tensor."""
    t.__dict__.pop(MARK, None)


def forget(tensors: Iterable[Tensor]) -> None:
    """Remove the marks of tensors that the user gets."""
    for t in tensors:
        t.__dict__.pop(MARK, None)
