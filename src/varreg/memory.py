"""Memory for what is computed along the way."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from torch import Tensor

AT_MOST = 1 << 23  # elements that are kept for one use

_workspace = threading.local()


def scratch(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialized tensor for passing work, valid until the next call for the same use.

    On the CPU its memory is kept: fresh memory of this size would be handed out page by page, at the price of the work itself.
    """
    numel = math.prod(shape)
    if like.device.type != "cpu" or numel > AT_MOST:
        return like.new_empty(shape)
    key = f"{use} {like.dtype}"
    buffer: Tensor | None = getattr(_workspace, key, None)
    if buffer is None or buffer.numel() < numel:
        buffer = like.new_empty(numel)
        setattr(_workspace, key, buffer)
    return buffer[:numel].view(tuple(shape))
