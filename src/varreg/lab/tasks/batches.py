"""The samples of one split, as tensors or from a Dataset, and the batches of a run.
(`preparation.py` holds samples out for validation.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as _collate

from varreg.errors import VarregError
from varreg.lab.tasks.randomness import seeded


class Split(NamedTuple):
    """Inputs and targets, preloaded."""

    x: Tensor
    """The inputs."""
    y: Tensor
    """The targets."""

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor, seed: int) -> Split:
        """Return the samples of an index."""
        return Split(self.x[index], self.y[index])

    def rows(self, begin: int, end: int) -> Split:
        """Return samples that follow each other."""
        return Split(self.x[begin:end], self.y[begin:end])

    def to(self, device: torch.device) -> Split:
        """Return the samples on a device."""
        return Split(self.x.to(device), self.y.to(device))


class DataSplit:
    """Samples that a Dataset loads on request. Each call uses the random numbers of its own seed,
    independent of earlier calls.
    """

    def __init__(self, given: Dataset[Any] | DataLoader[Any], where: str):
        loader = given if isinstance(given, DataLoader) else None
        self.dataset: Any = given if loader is None else loader.dataset
        self.collate = _collate if loader is None else loader.collate_fn
        self.workers = 0 if loader is None else loader.num_workers
        self.prepare = None if loader is None else loader.worker_init_fn
        self.where, self.device = where, torch.device("cpu")
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise VarregError(
                f"varreg: {where} is a Dataset without a length. The lab draws batches itself, so "
                "that a resumed run is the same to the bit: give a Dataset with __len__ and "
                "__getitem__, or make batches by Task(stream=...)."
            )
        known = (SequentialSampler, RandomSampler)
        sampler = None if loader is None else getattr(loader, "sampler", None)
        plain = type(getattr(loader, "batch_sampler", None)).__module__.startswith("torch.utils")
        if loader is not None and not (isinstance(sampler, known) and plain):
            raise VarregError(
                f"varreg: {where} is a DataLoader with a sampler of its own "
                f"({type(sampler).__name__}). The lab draws batches itself, the same ones for all "
                "optimizers: give a DataLoader with shuffle=True or False and a batch_size, or a "
                "Dataset; or make batches by Task(stream=...)."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, index: Sequence[int] | Tensor, seed: int) -> Split:
        """Return the samples of an index, loaded with the random numbers of a seed."""
        chosen = index.tolist() if isinstance(index, Tensor) else index
        with seeded(seed):
            found = self.collate([self.dataset[i] for i in chosen])
        pair = list(found) if isinstance(found, (tuple, list)) else []
        if len(pair) != 2 or not all(isinstance(t, Tensor) and t.dim() for t in pair):
            raise VarregError(
                f"varreg: {self.where} must give (inputs, targets), both tensors once samples are "
                f"collated; got {_described(found)}."
            )
        if not len(pair[0]) == len(pair[1]) == len(chosen):
            raise VarregError(
                f"varreg: {self.where}: {len(chosen)} samples are collated to inputs of shape "
                f"{tuple(pair[0].shape)} and targets of shape {tuple(pair[1].shape)}."
            )
        return Split(*pair).to(self.device)

    def rows(self, begin: int, end: int) -> Split:
        """Return consecutive samples, always with the same random numbers."""
        return self.take(range(begin, min(end, len(self))), begin)

    def to(self, device: torch.device) -> DataSplit:
        """Return this split with its samples on a device."""
        self.device = device
        return self


Samples = Split | DataSplit
"""The kinds of splits from which a run takes batches."""


class Batches:
    """The batches of a run's steps. `draw(step)` returns the indices of the samples, and the seed.
    Worker processes of a DataLoader load batches in advance.
    """

    def __init__(self, split: DataSplit, draw: Callable[[int], tuple[Tensor, int]], total: int):
        self.split, self.draw, self.total = split, draw, total
        self._ahead: Iterator[Split] | None = None
        self._next = -1

    def __getitem__(self, step: int) -> Split:
        return self.split.take(*self.draw(step))

    def at(self, step: int) -> Split:
        """Return the batch of a step."""
        if not self.split.workers:
            return self[step]
        if self._ahead is None or step != self._next:
            # the loader's "sample" is a whole batch, so that no batch depends on the worker
            self._ahead = iter(
                DataLoader(
                    self,  # type: ignore[arg-type]
                    batch_size=None,
                    sampler=range(step, max(self.total, step + 1)),
                    num_workers=self.split.workers,
                    worker_init_fn=self.split.prepare,
                    generator=torch.Generator(),  # otherwise it would draw from torch's generator
                    collate_fn=_as_it_is,
                )
            )
        self._next = step + 1
        return next(self._ahead)


def _as_it_is(batch: Any) -> Any:
    return batch


def _described(found: Any) -> str:
    """Return a description of a value that a Dataset returned."""
    if isinstance(found, (tuple, list)):
        return f"{len(found)} values: {', '.join(type(x).__name__ for x in found)}"
    return type(found).__name__
