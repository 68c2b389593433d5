"""The configuration of a training run, and the batches that follow from it."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from varreg.lab import specs

Results = dict[str, dict[str, Any]]
"""The results of runs, by their names."""
Arms = dict[str, list[dict[str, Any]]]
"""The results of each arm's runs, by its name."""
_LONGEST = 246
"""The largest number of bytes of a name before its checksum. File systems allow 255 in all."""


@dataclass(frozen=True)
class Config:
    """The configuration of a run: everything that its result depends on."""

    task: str
    optimizer: str
    lr: float
    seed: int = 0
    epochs: int = 1
    batch: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""
    log_every: int = 10
    """Steps between two measurements of λ, ρ and the noise."""
    test: Literal["never", "end", "epochs"] = "never"
    """When the test split is read: never in a run for tuning, at the end for a verdict, after every
    epoch for a figure.
    """

    @property
    def name(self) -> str:
        """Return the name of the folder: the main settings, and a checksum of all settings, so that
        no two runs share a folder. It has only characters that are safe in shells and file systems.

        >>> Config("mine:task", "SGD", 0.1).name
        'mine_task_SGD_lr=0.1_seed=0_...'
        """
        words = re.sub(r"[^\w.,=+-]+", "_", self._words)
        return f"{_cut(words)}_{self._checksum}"

    def folder_in(self, runs: Path) -> Path:
        """Return the run's folder. Earlier versions of varreg used names with spaces: if such a
        folder exists, return it.
        """
        before = runs / f"{_cut(self._words.replace('/', '-'))} {self._checksum}"
        return before if before.exists() else runs / self.name

    @property
    def _words(self) -> str:
        optimizer = specs.spell(self.optimizer, self.options)
        return f"{self.task} {optimizer} lr={self.lr:g} seed={self.seed}"

    @property
    def _checksum(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


def _cut(name: str) -> str:
    return name[:160].encode()[:_LONGEST].decode(errors="ignore")


@functools.lru_cache(maxsize=2)
def batches(n: int, batch: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """Return the indices of an epoch's batches. An incomplete last batch is left out, so that all
    batches have the same size.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    return tuple(order[: n // batch * batch].split(batch))
