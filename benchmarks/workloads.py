"""What speeds are measured on: models, each with a batch of the right shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varreg.lab.models import GPT, lenet, mlp, paper_cnn, resnet18


class Workload(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    """A mean over samples."""


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def images(batch: int, *shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, *shape), torch.randint(0, 10, (batch,)))


def text(batch: int, tokens: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, 256, (batch, tokens)), torch.randint(0, 256, (batch, tokens)))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("paper's CNN, batch 100", paper_cnn, images(100, 1, 28, 28)),
        Workload("paper's CNN, batch 256", paper_cnn, images(256, 1, 28, 28)),
        Workload("MLP 784-512-512-10, batch 64", mlp, images(64, 1, 28, 28)),
        Workload("LeNet on CIFAR, batch 100", lenet, images(100, 3, 32, 32)),
        Workload("ResNet-18, width 32, GroupNorm, batch 32", resnet18, images(32, 3, 32, 32)),
        Workload("GPT 4×192, batch 16, 128 tokens", GPT, text(16, 128), token_loss),
    )
}
