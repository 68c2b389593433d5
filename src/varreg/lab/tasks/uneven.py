"""Tasks with uneven batches: each batch comes from one of several sources, which differ in noise or
in entropy.

This is the case of the paper's theory: the variance changes from batch to batch. With `mixed=True`,
each sample of a batch has its own source: the data are the same, but all batches are alike.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varreg.errors import VarregError
from varreg.lab import models
from varreg.lab.tasks import datasets
from varreg.lab.tasks.definition import Split, Splits, Task
from varreg.lab.tasks.preparation import hold_out, per_token, unit_norm

CLASSES = 10
HARD = (0, 2, 3, 4, 6)
"""Classes of Fashion-MNIST that are mistaken for each other: T-shirt, pullover, dress, coat, shirt.
The others are trouser, sandal, sneaker, bag and boot.
"""
TRAIN, VALID = 12_800, 5_000
BATCH, EPOCHS = 64, 2
TEXT = Path(__file__).with_name("prose_and_code.xz")
"""varreg's own documentation and source, as they were in version 0.2: the same on every machine."""
SEPARATOR = "\0"

Draw = Callable[[torch.Generator, int], Tensor]
"""A function of a generator and a number of samples. It returns the sources of the samples."""


def _sources(count: int, mixed: bool) -> Draw:
    """Return a function that draws the sources of a batch: one for all samples, or one for each."""
    if not isinstance(mixed, bool):
        raise VarregError(f"varreg: mixed must be True or False; got {mixed!r}.")

    def draw(generator: torch.Generator, batch: int) -> Tensor:
        drawn = torch.randint(count, (batch if mixed else 1,), generator=generator)
        return drawn.expand(batch)

    return draw


def _generator(seed: int, step: int) -> torch.Generator:
    """Return the generator of a step's batch."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


class _SmallFashion:
    """A part of Fashion-MNIST at 14 × 14 pixels, read when it is first needed."""

    def __init__(self) -> None:
        self.train: Split | None = None

    def __call__(self, data_dir: Path | None) -> Splits:
        train, test = (_halved(unit_norm(images)) for images in datasets.fashion_mnist(data_dir))
        splits = hold_out(train, test, VALID)
        self.train = Split(splits.train.x[:TRAIN], splits.train.y[:TRAIN])
        return Splits(self.train, *splits[1:])

    def samples(self) -> Split:
        """Return the training samples. Usually the lab has loaded them already."""
        return self.train or self(None).train


def _halved(split: Split) -> Split:
    """Return images of half the width and height: each pixel is the mean of four. They are scaled
    so that the mean square of pixels is about 1.
    """
    return Split(28 * F.avg_pool2d(split.x, 2), split.y)


def _mlp() -> nn.Module:
    hidden = 100
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(196, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)),
    )


def _mixture(mixed: bool) -> str:
    return "each sample" if mixed else "each batch"


def uneven_labels(sources: int = 10, mixed: bool = False) -> Task:
    """An MLP on Fashion-MNIST at 14 × 14, each batch from a source with its own label noise.

    Of source k of K, k/K of the labels are replaced by random ones. Evaluation is without noise.
    """
    if not isinstance(sources, int) or sources < 1:
        raise VarregError(f"varreg: uneven-labels needs sources ≥ 1; got {sources!r}.")
    data, draw = _SmallFashion(), _sources(sources, mixed)

    def fresh(seed: int, step: int, batch: int) -> Split:
        generator, train = _generator(seed, step), data.samples()
        at = torch.randint(len(train), (batch,), generator=generator)
        noise = draw(generator, batch) / sources
        wrong = torch.rand(batch, generator=generator) < noise
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        return Split(train.x[at], torch.where(wrong, labels, train.y[at]))

    about = (
        f"an MLP on Fashion-MNIST at 14 × 14; {_mixture(mixed)} comes from one of {sources} "
        f"sources, with wrong labels from 0 to {100 * (sources - 1) // sources} %"
    )
    return Task(about, data, _mlp, BATCH, EPOCHS, stream=fresh)


def uneven_classes(mixed: bool = False) -> Task:
    """An MLP on Fashion-MNIST at 14 × 14, each batch of easy or of hard classes.

    All labels are right: the sources differ in entropy, and not in quality.
    """
    data, draw = _SmallFashion(), _sources(2, mixed)

    def fresh(seed: int, step: int, batch: int) -> Split:
        generator, train = _generator(seed, step), data.samples()
        hard = torch.isin(train.y, torch.tensor(HARD))
        pools = (~hard).nonzero().flatten(), hard.nonzero().flatten()
        places = [p[torch.randint(len(p), (batch,), generator=generator)] for p in pools]
        at = torch.where(draw(generator, batch) == 0, *places)
        return Split(train.x[at], train.y[at])

    about = (
        f"an MLP on Fashion-MNIST at 14 × 14; {_mixture(mixed)} is of easy classes or of hard ones"
    )
    return Task(about, data, _mlp, BATCH, EPOCHS, stream=fresh)


def read_texts() -> tuple[str, str]:
    """Return prose and code, of the same length."""
    prose, code = lzma.decompress(TEXT.read_bytes()).decode().split(SEPARATOR)
    n = min(len(prose), len(code))
    return prose[:n], code[:n]


def uneven_text(mixed: bool = False, context: int = 16, layers: int = 1, width: int = 32) -> Task:
    """A character-level GPT, each batch of prose or of code: documentation and source of varreg.

    Neither is noisier than the other: the sources differ in entropy, and not in quality.
    """
    draw = _sources(2, mixed)
    kept: list[Tensor] = []  # windows to train on, of both sources

    def windows(text: str) -> Tensor:
        codes = torch.tensor([min(ord(c), 127) for c in text])
        whole = codes[: (len(codes) - 1) // context * context + 1]
        cut = whole.unfold(0, context + 1, context)
        return cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))]

    def load(data_dir: Path | None) -> Splits:
        both = torch.stack([windows(text) for text in read_texts()])  # source, window, character
        a, b = int(0.8 * both.shape[1]), int(0.9 * both.shape[1])
        kept[:] = [both[:, :a]]
        parts = (both[:, i:j].transpose(0, 1).flatten(0, 1) for i, j in ((0, a), (a, b), (b, None)))
        return Splits(*(Split(part[:, :-1].clone(), part[:, 1:].clone()) for part in parts))

    def fresh(seed: int, step: int, batch: int) -> Split:
        if not kept:
            load(None)
        generator, train = _generator(seed, step), kept[0]
        at = torch.randint(train.shape[1], (batch,), generator=generator)
        rows = train[draw(generator, batch), at]
        return Split(rows[:, :-1].clone(), rows[:, 1:].clone())

    def model() -> nn.Module:
        return models.GPT(layers, width, max(1, width // 16), 128, context)

    size = f"{layers} × {width}, context {context}"
    about = f"a character-level GPT ({size}); {_mixture(mixed)} is of prose or of code"
    return Task(about, load, model, BATCH, 1, per_token, stream=fresh)
