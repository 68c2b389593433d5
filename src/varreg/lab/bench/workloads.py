"""The workloads of the benchmarks: models, each with a batch of the right shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varreg._torch import tree_leaves, tree_map
from varreg.lab.models import GPT, lenet, mlp, paper_cnn, resnet18
from varreg.lab.tasks.preparation import per_token
from varreg.lab.tasks.randomness import seeded

Batch = tuple[Any, Any]
"""Inputs and targets: tensors, or tuples and dicts of them, with the samples along the first
dimension.
"""


class Workload(NamedTuple):
    """A model with a batch and a loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[..., Tensor] = F.cross_entropy
    """Of the model's output and the targets; a mean over samples."""


def images(batch: int, *shape: int, classes: int = 10) -> Callable[[], Batch]:
    """Return a function that draws a batch of images and classes."""
    return lambda: (torch.randn(batch, *shape), torch.randint(0, classes, (batch,)))


def text(batch: int, tokens: int) -> Callable[[], Batch]:
    """Return a function that draws a batch of tokens and their successors."""
    return lambda: (torch.randint(0, 256, (batch, tokens)), torch.randint(0, 256, (batch, tokens)))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("paper's CNN, batch 100", paper_cnn, images(100, 1, 28, 28)),
        Workload("LeNet on CIFAR, batch 100", lenet, images(100, 3, 32, 32)),
        Workload("ResNet-18, width 32, GroupNorm, batch 32", resnet18, images(32, 3, 32, 32)),
        Workload("GPT 4×192, batch 16, 128 tokens", GPT, text(16, 128), per_token),
        Workload("MLP 784-512-512-10, batch 64", mlp, images(64, 1, 28, 28)),
        Workload(
            "paper's CNN, width ×8, batch 32",
            functools.partial(paper_cnn, 8),
            images(32, 1, 28, 28),
        ),
    )
}
"""The workloads, by name. The last two are the hardest cases, since they do little besides reading
their parameters: the cost of a step per parameter shows most.
"""
YARDSTICK = tuple(WORKLOADS)[:4]
"""The workloads for all measurements other than whole steps."""


def on_device(w: Workload, device: str) -> Workload:
    """Return a workload whose model and batch are made on the CPU, and moved to a device."""

    def batch() -> Batch:
        x, y = w.batch()
        return _moved(x, device), _moved(y, device)

    return w._replace(make=lambda: w.make().to(device), batch=batch)


def _moved(tree: Any, device: str) -> Any:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, tree)


def built(w: Workload) -> tuple[nn.Module, Any, Any]:
    """Return model, inputs and targets, the same every time."""
    with seeded(0):
        return w.make(), *w.batch()


def call(model: nn.Module, x: Any) -> Any:
    """Call a model. A tuple has positional arguments, a dict has keyword arguments."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def part(tree: Any, which: slice) -> Any:
    """Return some of the samples."""
    return tree_map(lambda t: t[which] if isinstance(t, Tensor) else t, tree)


def samples(tree: Any) -> int:
    """Return the number of samples."""
    return next(len(t) for t in tree_leaves(tree) if isinstance(t, Tensor))
