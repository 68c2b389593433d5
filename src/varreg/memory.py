"""Memory for what is computed along the way."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

AT_MOST = 1 << 23  # elements that are kept for one use

_workspace = threading.local()


def scratch(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialized tensor for passing work, valid until the next call for the same use.

    On the CPU its memory is kept: fresh memory of this size would be handed out page by page, at the price of the work itself.
    """
    numel = math.prod(shape)
    if not like.is_cpu or numel > AT_MOST:
        return like.new_empty(shape)
    return room(use, numel, like)[:numel].view(tuple(shape))


def room(use: str, numel: int, like: Tensor) -> Tensor:
    """Scratch memory on the CPU for so many elements at least."""
    kept: dict[Any, Tensor] = _workspace.__dict__  # this thread's own
    key = use, like.dtype
    buffer = kept.get(key)
    if buffer is None or buffer.numel() < numel:
        buffer = like.new_empty(numel)
        if numel <= AT_MOST:
            kept[key] = buffer
    return buffer


def forget() -> None:
    """Give this thread's scratch memory back."""
    _workspace.__dict__.clear()
