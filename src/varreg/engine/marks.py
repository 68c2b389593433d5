"""What is known of a tensor in the forward pass under way: where it carries the batch, or that it is made of parameters alone."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from varreg.engine.arguments import tensors_of
from varreg.engine.layout import Layout, Lost, Where, only_sample

_MARK = "_varreg_where"


class Derived:
    """Marks a tensor that was made of parameters alone."""


DERIVED = Derived()
_layout = functools.lru_cache(maxsize=256)(Layout)
_epoch = 0  # of the forward pass under way: marks of an earlier one mean nothing


def new_epoch() -> None:
    global _epoch
    _epoch += 1


def payload_of(t: Tensor) -> tuple[Any, ...] | None:
    """A tensor's mark, if it has one of this forward pass, as plain numbers and strings."""
    kept = t.__dict__.get(_MARK)
    return None if kept is None or kept[0] != _epoch else kept[1]


def mark_of(t: Tensor) -> Where | Derived | None:
    """What is known of a tensor in this forward pass."""
    payload = payload_of(t)
    if payload is None:
        return None
    return _layout(*payload) if len(payload) == 4 else Lost(*payload) if payload else DERIVED


def mark(t: Tensor, where: Where | Derived) -> None:
    """Note it, as plain numbers and strings, so that a marked tensor can still be saved and loaded by anyone."""
    if type(where) is Layout and where.batch == 1:
        where = only_sample(t)
    t.__dict__[_MARK] = (_epoch, () if isinstance(where, Derived) else tuple(where))


def put(t: Tensor, payload: tuple[Any, ...]) -> None:
    """A mark as `payload_of` gave it for a tensor of the same shape."""
    t.__dict__[_MARK] = (_epoch, payload)


def unmark(t: Tensor) -> None:
    t.__dict__.pop(_MARK, None)


def forget(tree: Any) -> None:
    """Remove the tracer's marks from a structure of tensors that is about to be the user's."""
    for t in tensors_of(tree):
        unmark(t)
