"""Workspaces: memory for what is computed along the way, kept from call to call."""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from varreg.thresholds import WORKSPACE

_ALL: weakref.WeakSet[Workspace] = weakref.WeakSet()


class Workspace(threading.local):
    """Memory for passing work of one kind, in each thread and for each type of number.

    Who takes from a workspace owns the memory until the next `take` from the same one. So its users
    are in one place, and hand nothing of it to callers who do not know.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}
        _ALL.add(self)

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized tensor, of another's type and on its device.

        On the CPU its memory is kept: fresh memory of this size would be handed out page by page,
        at the price of the work itself.
        """
        numel = math.prod(shape)
        if not like.is_cpu or numel > WORKSPACE:
            return like.new_empty(shape)
        return self.room(numel, like)[:numel].view(tuple(shape))

    def room(self, numel: int, like: Tensor) -> Tensor:
        """Return memory on the CPU for so many elements at least."""
        buffer = self._kept.get(like.dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = like.new_empty(numel)
            if numel <= WORKSPACE:
                self._kept[like.dtype] = buffer
        return buffer

    def clear(self) -> None:
        """Give this thread's memory back."""
        self._kept.clear()


def forget() -> None:
    """Give the memory of all workspaces in this thread back."""
    for workspace in _ALL:
        workspace.clear()


_NAMED: defaultdict[str, Workspace] = defaultdict(Workspace)


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor in the workspace of a name, valid until the next call for the same one."""
    return _NAMED[name].take(shape, like)
