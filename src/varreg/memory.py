"""Memory for intermediate results, kept from call to call; and memory for large results, in large
pages, which the system provides faster.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varreg._torch import has_storage
from varreg.thresholds import LARGE_PAGES, WORKSPACE

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


# ---- large pages ---------------------------------------------------------------------------------

PAGE, HUGE = mmap.PAGESIZE, getattr(mmap, "MADV_HUGEPAGE", None)
"""The size of a small page, and Linux's name for the advice; None on other systems."""


def ask_large_pages(*tensors: Tensor) -> None:
    """Ask the system for large pages for new tensors, if they are large, before they are written.
    Where there are none to ask for, do nothing.
    """
    advise = _advise()
    for t in tensors:
        is_real = type(t) is Tensor and t.is_cpu and has_storage(t)
        if advise is not None and is_real and t.numel() >= LARGE_PAGES:
            start = -(-t.data_ptr() // PAGE) * PAGE
            advise(start, t.data_ptr() + t.nbytes - start, HUGE)  # the system may refuse it


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros with the type and device of `like`, in large pages if they are large."""
    out = like.new_empty(shape)
    ask_large_pages(out)
    return out.zero_()


def empty_like(t: Tensor) -> Tensor:
    """Return an uninitialized tensor like `t`, in large pages if it is large."""
    out = torch.empty_like(t)
    if t.numel() >= LARGE_PAGES:
        ask_large_pages(out)
    return out


@functools.cache
def _advise() -> Callable[..., Any] | None:
    """Return `madvise` of the system's library; None where there are no large pages to ask for."""
    if HUGE is None:
        return None
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
