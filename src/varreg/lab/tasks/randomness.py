"""Seed, save and restore the random numbers of torch, NumPy and Python, since a user's task may use
any of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of torch, NumPy and Python, as a checkpoint can hold them."""
    kind, key, *rest = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(key.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators inside of the `with` block, and restore their states afterwards."""
    before = random_state()
    seed_all(seed)
    try:
        yield
    finally:
        set_random_state(before)
