"""Workspaces: memory for intermediate results, kept from call to call."""

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
    """Memory for temporary results of one kind, in each thread and for each type of number.

    A tensor from a workspace is valid until the next `take` from the same workspace. Two functions
    return such a tensor: `Contribution.groups` returns C_u of some groups, which the next call
    overwrites, and `ParameterStep.increment_and_variance` in optim/parameter_step.py returns a
    variance, which that of the next parameter overwrites.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}
        _ALL.add(self)

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized tensor with the type and device of `like`.

        On the CPU the memory is kept: the system provides new memory of this size page by page,
        which takes as long as the work itself.
        """
        numel = math.prod(shape)
        if not like.is_cpu or numel > WORKSPACE:
            return like.new_empty(shape)
        return self.room(numel, like)[:numel].view(tuple(shape))

    def room(self, numel: int, like: Tensor) -> Tensor:
        """Return memory on the CPU for at least this number of elements."""
        buffer = self._kept.get(like.dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = like.new_empty(numel)
            if numel <= WORKSPACE:
                self._kept[like.dtype] = buffer
        return buffer

    def clear(self) -> None:
        """Free this thread's memory."""
        self._kept.clear()


def forget() -> None:
    """Free the memory of all workspaces of this thread."""
    for workspace in _ALL:
        workspace.clear()


_NAMED: defaultdict[str, Workspace] = defaultdict(Workspace)


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor in the workspace of this name. It is valid until the next call with the same
    name.
    """
    return _NAMED[name].take(shape, like)
