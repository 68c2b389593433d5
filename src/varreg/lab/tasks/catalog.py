"""The tasks that come with varreg. Each is a function; its arguments are the task's options.

The first line of its docstring is what `varreg list` prints.
"""

from __future__ import annotations

import functools
import math
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from varreg.errors import VarregError
from varreg.lab import models
from varreg.lab.tasks import datasets, uneven
from varreg.lab.tasks.definition import Split, Splits, Task
from varreg.lab.tasks.preparation import hold_out, per_token, unit_norm


def _digits(data_dir: Path | None) -> Splits:
    """Load scikit-learn's digits."""
    from sklearn.datasets import load_digits  # here, since it takes a second

    embedded = load_digits()
    x, y = (
        torch.tensor(embedded.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(embedded.target),
    )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return hold_out(Split(x[train], y[train]), Split(x[test], y[test]), 360)


def _fashion_mnist(valid: int, keep: int, data_dir: Path | None) -> Splits:
    """Load Fashion-MNIST, with `valid` samples held out, and `keep` of the others; 0: all."""
    train, test = datasets.fashion_mnist(data_dir)
    return hold_out(unit_norm(train), unit_norm(test), valid, keep)


def _cifar10(valid: int, keep: int, scale: float, data_dir: Path | None) -> Splits:
    """Load CIFAR-10, with `valid` samples held out, and `keep` of the others; 0: all. Images have a
    norm of `scale`.
    """
    train, test = (unit_norm(split) for split in datasets.cifar10(data_dir))
    if scale != 1:
        train, test = (Split(scale * split.x, split.y) for split in (train, test))
    return hold_out(train, test, valid, keep)


def digits() -> Task:
    """scikit-learn's embedded 8 × 8 digits, a small CNN."""
    return Task(
        "scikit-learn's embedded 8 × 8 digits, a small CNN", _digits, models.digits_cnn, 64, 15
    )


def logistic() -> Task:
    """Logistic regression on the same digits: convex."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    return Task("logistic regression on scikit-learn's digits: convex", _digits, model, 64, 15)


def fashion_mnist(valid: int = 10_000, train: int = 0) -> Task:
    """The paper's CNN on Fashion-MNIST."""
    return Task(
        "the paper's CNN on Fashion-MNIST",
        functools.partial(_fashion_mnist, valid, train),
        models.paper_cnn,
        100,
        20,
    )


def fashion_mlp(valid: int = 10_000, train: int = 0) -> Task:
    """A small MLP on Fashion-MNIST at 14 × 14 pixels."""

    def load(data_dir: Path | None) -> Splits:
        fit, test = (
            Split(F.avg_pool2d(images.pixels.float() / 255, 2), images.labels)
            for images in datasets.fashion_mnist(data_dir)
        )
        return hold_out(fit, test, valid, train)

    return Task("a small MLP on Fashion-MNIST at 14 × 14 pixels", load, models.small_mlp, 32, 5)


def cifar10_lenet(valid: int = 5_000, train: int = 0, scale: float = 1.0) -> Task:
    """LeNet on CIFAR-10, as in the paper: images have a norm of 1. Then training stays on a plateau
    for tens of epochs; with `scale=55`, pixels have a mean square of 1, and it mostly does not.
    """
    if not scale > 0:
        raise VarregError(f"varreg: scale must be above 0; got {scale!r}.")
    return Task(
        f"LeNet on CIFAR-10, {'as in the paper' if scale == 1 else f'with images of norm {scale}'}",
        functools.partial(_cifar10, valid, train, scale),
        models.lenet,
        100,
        20,
    )


def cifar10_resnet(valid: int = 5_000, width: int = 16, train: int = 0) -> Task:
    """ResNet-18 with GroupNorm on CIFAR-10."""
    about = f"ResNet-18 of width {width} with GroupNorm on CIFAR-10"
    return Task(
        about,
        functools.partial(_cifar10, valid, train, 1.0),
        functools.partial(models.resnet18, width),
        100,
        10,
    )


def char_gpt(context: int = 64, layers: int = 2, width: int = 64) -> Task:
    """A character-level GPT on the help texts that come with Python."""

    def load(data_dir: Path | None) -> Splits:
        text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        codes = torch.tensor([min(ord(c), 127) for c in text])
        windows = codes[: (len(codes) - 1) // context * context + 1].unfold(0, context + 1, context)
        every = Split(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        a, b = int(0.8 * len(every)), int(0.9 * len(every))
        return Splits(
            *(Split(every.x[i:j], every.y[i:j]) for i, j in ((0, a), (a, b), (b, len(every))))
        )

    def model() -> nn.Module:
        return models.GPT(layers, width, max(1, width // 32), 128, context)

    size = f"{layers} × {width}, context {context}"
    about = f"a character-level GPT ({size}) on the help texts that come with Python"
    return Task(about, load, model, 32, 10, per_token)


def stream(spread: float = 1.0, noise: float = 1.0, dimension: int = 20) -> Task:
    """Linear regression on a stream whose noise changes from batch to batch.

    Targets are x·w* + σ_t·ε, with log σ_t² normal of standard deviation 2·`spread` and mean σ_t² =
    `noise`² for every spread: at 0 all batches are equally noisy, at 2 a few are very noisy and
    most are nearly clean. Evaluation is without noise.
    """
    if spread < 0 or noise < 0 or dimension < 1:
        raise VarregError(
            f"varreg: stream needs spread ≥ 0, noise ≥ 0 and dimension ≥ 1; got {spread}, {noise}, "
            f"{dimension}."
        )
    truth = torch.randn(dimension, generator=torch.Generator().manual_seed(0)) / math.sqrt(
        dimension
    )

    def clean(n: int, seed: int) -> Split:
        x = torch.randn(n, dimension, generator=torch.Generator().manual_seed(seed))
        return Split(x, (x @ truth).unsqueeze(1))

    def fresh(seed: int, step: int, batch: int) -> Split:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        x = torch.randn(batch, dimension, generator=generator)
        sigma = noise * math.exp(spread * float(torch.randn((), generator=generator)) - spread**2)
        return Split(x, (x @ truth + sigma * torch.randn(batch, generator=generator)).unsqueeze(1))

    def load(data_dir: Path | None) -> Splits:
        return Splits(clean(3200, -1), clean(1000, -2), clean(1000, -3))

    about = (
        f"linear regression on a stream, noise of mean square {noise**2:g} that changes from batch "
        f"to batch (spread {spread:g})"
    )
    return Task(about, load, lambda: nn.Linear(dimension, 1), 32, 10, F.mse_loss, None, fresh)


TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "logistic": logistic,
    "stream": stream,
    "char-gpt": char_gpt,
    "fashion-mnist": fashion_mnist,
    "fashion-mlp": fashion_mlp,
    "cifar10-lenet": cifar10_lenet,
    "cifar10-resnet": cifar10_resnet,
    "uneven-labels": uneven.uneven_labels,
    "uneven-classes": uneven.uneven_classes,
    "uneven-text": uneven.uneven_text,
}
