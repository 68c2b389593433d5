"""The processes that torchrun started divide the runs of an experiment among them. Each run is
trained by one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

PATIENCE = timedelta(hours=6)
"""How long the others wait for the first process to begin, since it may download data. If it dies,
torchrun ends the others.
"""


class Team:
    """A team of processes: this one is number `rank` of `world`, and `here` of them are on this
    machine.
    """

    def __init__(self, rank: int, world: int, here: int):
        self.rank, self.world, self.here = rank, world, here
        self._store: Any = None

    @classmethod
    def alone(cls) -> Team:
        """Return a team of this process alone."""
        return cls(0, 1, 1)

    @classmethod
    def of_torchrun(cls) -> Team:
        """Return the team that torchrun started; without it, this process alone."""
        if not dist.is_available() or not dist.is_torchelastic_launched():
            return cls.alone()
        return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))

    @property
    def first(self) -> bool:
        """Return whether this process is the first."""
        return self.rank == 0

    def from_first(self, make: Callable[[], str]) -> str:
        """Return the value that the first process computes; the others wait for it."""
        if self.world == 1:
            return make()
        # Kept alive, since this process may serve the store to the others.
        self._store, *_ = next(rendezvous("env://", timeout=PATIENCE))
        if self.first:
            self._store.set("varreg begun", make())
        return str(self._store.get("varreg begun").decode())
