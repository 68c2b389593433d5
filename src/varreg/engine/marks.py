"""What is known of a tensor in the forward pass under way: where it carries the batch, or that it is made of parameters alone."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

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


def mark_of(t: Tensor) -> Where | Derived | None:
    """What is known of a tensor in this forward pass."""
    kept = t.__dict__.get(_MARK)
    if kept is None or kept[0] != _epoch:
        return None
    payload = kept[1]
    return _layout(*payload) if len(payload) == 4 else Lost(*payload) if payload else DERIVED


def mark(t: Tensor, where: Where | Derived) -> None:
    """Note it, as plain numbers and strings, so that a marked tensor can still be saved and loaded by anyone."""
    if isinstance(where, Layout) and where.batch == 1:
        where = only_sample(t)
    t.__dict__[_MARK] = (_epoch, () if isinstance(where, Derived) else tuple(where))


def unmark(t: Tensor) -> None:
    t.__dict__.pop(_MARK, None)


def forget(tree: Any) -> None:
    """Remove the tracer's marks from a structure of tensors that is about to be the user's."""
    for t in tree_leaves(tree):
        if isinstance(t, Tensor):
            unmark(t)
