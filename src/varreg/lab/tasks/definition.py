"""The definition of a task: three splits of data, a model, and a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from varreg.lab.tasks.augmentation import Augmentation
from varreg.lab.tasks.batches import Split as Split


class Splits(NamedTuple):
    """The data of a task. Parameters are fitted to `train`, choices are made on `valid`, and `test`
    is read once, at the end. Each is a `Split` of tensors, a Dataset, or a DataLoader around one. A
    run turns a Dataset or DataLoader into a `DataSplit`.
    """

    train: Any
    valid: Any
    test: Any


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers; the last dimension of the output has a score per class."""
    return (output.argmax(-1) == y).float().mean()


@dataclass(frozen=True)
class Task:
    """Data, a model for it, and a budget."""

    about: str
    """What the task is, in a few words."""
    load: Callable[[Path | None], Splits]
    """Returns the three splits. Its argument is a data folder, or None."""
    model: Callable[[], nn.Module]
    """Returns a new model, initialized from torch's random state."""
    batch: int
    """The batch size."""
    epochs: int
    """The number of passes over `train` of a run."""
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    """The loss, a function of the model's output and the targets: a mean over samples."""
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = accuracy
    """A function like the loss: a mean over samples. None if the task has no accuracy."""
    stream: Callable[[int, int, int], Split] | None = None
    """Returns fresh samples for (seed, step, batch size). They replace passes over `train`, which
    is then used for evaluation only.
    """
    augment: Augmentation | None = None
    """The augmentation of the inputs of training batches; not used for evaluation."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The default recipe: schedule, warmup, clip, weight_decay …"""
