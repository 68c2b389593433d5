"""Marks: what the forward that runs knows of a tensor, kept at the tensor itself.

A mark says where the tensor carries the batch, or that it is made of parameters alone. It holds
for one forward, told by its number; each thread has a forward of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from varreg.engine.arguments import tensors_of
from varreg.engine.layout import Layout, Lost, Owners, Ragged, Single, Summed, Where, only_sample

_MARK = "_varreg_where"


class Derived:
    """Marks a tensor that was made of parameters alone."""


DERIVED = Derived()
_layout = functools.lru_cache(maxsize=256)(Layout)
_counter = itertools.count(1)


class _Forward(threading.local):
    """The forward that runs in this thread: marks of another one mean nothing."""

    number = 0


_forward = _Forward()

# A mark is kept as plain numbers, strings and tensors, so that a marked tensor can still be saved
# and loaded by anyone. The kind is told by the length.
_DERIVED, _SINGLE, _LOST, _RAGGED, _LAYOUT, _UNSEEN = 0, 1, 2, 3, 4, 5


def new_epoch() -> None:
    """Begin a forward in this thread."""
    _forward.number = next(_counter)


def current_epoch() -> int:
    """Return the number of the forward that runs in this thread."""
    return _forward.number


@contextlib.contextmanager
def epoch(number: int) -> Iterator[None]:
    """Go back to an earlier forward, of which a checkpoint runs a part again."""
    before, _forward.number = _forward.number, number
    try:
        yield
    finally:
        _forward.number = before


def payload_of(t: Tensor) -> tuple[Any, ...] | None:
    """Return a tensor's mark, if it has one of this forward, as it is kept."""
    kept = t.__dict__.get(_MARK)
    return None if kept is None or kept[0] != _forward.number or kept[1] is _CONSTANT else kept[1]


def mark_of(t: Tensor) -> Where | Derived | None:
    """Return what is known of a tensor in this forward."""
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
    if kind == _SINGLE:
        batch, sample = payload[0]
        return Summed(batch) if sample is None else Single(batch, sample)
    return DERIVED


def is_unseen(t: Tensor) -> bool:
    """Was the tensor marked without gradients, and has one now? Something unseen gave it one.

    A re-entrant checkpoint does so, too; but its forward was followed, and will be again.
    """
    payload = payload_of(t)
    if payload is None or len(payload) != _UNSEEN or t.grad_fn is None:
        return False
    return t.grad_fn.name() != "CheckpointFunctionBackward"


def mark(t: Tensor, where: Where | Derived) -> None:
    """Note what is known of a tensor."""
    if isinstance(where, Layout) and where.batch == 1:
        where = only_sample(t)
    t.__dict__[_MARK] = (_forward.number, _payload(t, where))


def _payload(t: Tensor, where: Where | Derived) -> tuple[Any, ...]:
    if isinstance(where, Layout):
        if t.is_floating_point() and not t.requires_grad and not torch.is_grad_enabled():
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


_CONSTANT = (None,)  # seen to be made of constants alone


def mark_constant(t: Tensor) -> None:
    """Note that a tensor was seen to be made of constants alone."""
    t.__dict__[_MARK] = (_forward.number, _CONSTANT)


def is_constant(t: Tensor) -> bool:
    kept = t.__dict__.get(_MARK)
    return kept is not None and kept[0] == _forward.number and kept[1] is _CONSTANT


def put(t: Tensor, payload: tuple[Any, ...]) -> None:
    """Give a tensor a mark as `payload_of` gave it for a tensor of the same shape."""
    t.__dict__[_MARK] = (_forward.number, payload)


def unmark(t: Tensor) -> None:
    t.__dict__.pop(_MARK, None)


def forget(tree: Any) -> None:
    """Remove marks from a structure of tensors that is about to be the user's."""
    for t in tensors_of(tree):
        unmark(t)
