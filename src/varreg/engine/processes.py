"""The interface to other processes. In a single process it does nothing, and does not import
`varreg.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from varreg.engine.observer import Observer


def _never() -> bool:
    return False


are_several: Callable[[], bool] = (
    torch.distributed.is_initialized if torch.distributed.is_available() else _never
)
"""Returns whether processes may share the batch."""


def attach(observer: Observer) -> None:
    """Make an observer measure over all processes that share the batch. Do nothing if alone."""
    if are_several():
        from varreg import parallel

        parallel.attach(observer)
