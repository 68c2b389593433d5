"""What is trained: data, a model for it, and a budget."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from varreg.lab import data, models


class Split(NamedTuple):
    """Inputs and targets, preloaded."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


class Splits(NamedTuple):
    """Parameters are fitted to `train`, choices are made on `valid`, and `test` is read once, at the end."""

    train: Split
    valid: Split
    test: Split


class Task(NamedTuple):
    name: str
    about: str
    load: Callable[[Path | None], Splits]
    model: Callable[[], nn.Module]
    batch: int
    epochs: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    """A mean over samples."""


def unit_norm(images: data.Images) -> Split:
    """As in the paper's experiments: every image scaled to Euclidean norm 1."""
    x = images.pixels.float()
    return Split(x / x.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1), images.labels)


def hold_out(train: Split, test: Split, valid: int) -> Splits:
    """The last `valid` training samples, in an order that is always the same, are for choices."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    fit, choose = order[:-valid], order[-valid:]
    return Splits(Split(train.x[fit], train.y[fit]), Split(train.x[choose], train.y[choose]), test)


def _digits(data_dir: Path | None) -> Splits:
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return hold_out(Split(x[train], y[train]), Split(x[test], y[test]), 360)


def _fashion_mnist(data_dir: Path | None) -> Splits:
    train, test = data.fashion_mnist(data_dir)
    return hold_out(unit_norm(train), unit_norm(test), 10_000)


def _cifar10(data_dir: Path | None) -> Splits:
    train, test = data.cifar10(data_dir)
    return hold_out(unit_norm(train), unit_norm(test), 5_000)


def _logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


TASKS = {
    task.name: task
    for task in (
        Task("digits", "scikit-learn's embedded 8 × 8 digits, a small CNN", _digits, models.digits_cnn, 64, 20),
        Task("logistic", "the same digits, logistic regression: convex", _digits, _logistic, 64, 20),
        Task("fashion-mnist", "the paper's CNN on Fashion-MNIST", _fashion_mnist, models.paper_cnn, 100, 20),
        Task("cifar10-lenet", "LeNet on CIFAR-10, as in the paper", _cifar10, models.lenet, 100, 20),
    )
}


def task(name: str) -> Task:
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"varreg: there is no task {name!r}; there are: {', '.join(TASKS)}.{hint}")
    return TASKS[name]
