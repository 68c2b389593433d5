"""What speeds are measured on: models, each with a batch of the right shape; ours, and the user's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from varreg.lab import names
from varreg.lab.models import GPT, lenet, mlp, paper_cnn, resnet18
from varreg.lab.tasks import check_loss, per_token, seeded

Batch = tuple[Any, Any]
"""Inputs and targets: tensors, or tuples and dicts of them, with the samples along the first dimension."""


class Workload(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[..., Tensor] = F.cross_entropy
    """Of the model's output and the targets; a mean over samples."""


def images(batch: int, *shape: int, classes: int = 10) -> Callable[[], Batch]:
    return lambda: (torch.randn(batch, *shape), torch.randint(0, classes, (batch,)))


def text(batch: int, tokens: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, 256, (batch, tokens)), torch.randint(0, 256, (batch, tokens)))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("paper's CNN, batch 100", paper_cnn, images(100, 1, 28, 28)),
        Workload("LeNet on CIFAR, batch 100", lenet, images(100, 3, 32, 32)),
        Workload("ResNet-18, width 32, GroupNorm, batch 32", resnet18, images(32, 3, 32, 32)),
        Workload("GPT 4×192, batch 16, 128 tokens", GPT, text(16, 128), per_token),
        Workload("MLP 784-512-512-10, batch 64", mlp, images(64, 1, 28, 28)),
    )
}
"""By name. The last is the hardest case, since it does little else than touch its parameters."""
YARDSTICK = tuple(WORKLOADS)[:4]
"""What is measured unless others are asked for."""


def built(w: Workload) -> tuple[nn.Module, Any, Any]:
    """Model, inputs and targets, the same every time."""
    with seeded(0):
        return w.make(), *w.batch()


def call(model: nn.Module, x: Any) -> Any:
    """A tuple of inputs is for several arguments, a dict for named ones."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def part(tree: Any, which: slice) -> Any:
    """Some of the samples."""
    return tree_map(lambda t: t[which] if isinstance(t, Tensor) else t, tree)


def samples(tree: Any) -> int:
    return next(len(t) for t in tree_leaves(tree) if isinstance(t, Tensor))


# ---- the user's own ------------------------------------------------------------------------------------------------------


class Own(NamedTuple):
    """What the command line says of a model: plain words, so that another process can build the same."""

    model: str
    batch: str | None = None
    loss: str | None = None
    input: str | None = None
    classes: int | None = None
    batch_size: int | None = None

    def workload(self) -> Workload:
        """Checked: it can be trained."""
        made = Workload(self.model, self._model(), self._batch(), self._loss())
        check(made, self)
        return made

    def _model(self) -> Callable[[], nn.Module]:
        found, options = names.own(self.model, "--model")
        if isinstance(found, nn.Module):
            names.none(options, f"--model {self.model}, a model that is at hand,")
            return functools.partial(copy.deepcopy, found)
        if not callable(found):
            raise ValueError(
                f"varreg: --model {self.model} must be a class or function that makes a model, or a model; got {_kind(found)}."
            )

        def make() -> nn.Module:
            made = names.call(found, options, f"--model {self.model}")
            if not isinstance(made, nn.Module):
                raise ValueError(f"varreg: --model {self.model} must make a torch.nn.Module, and made {_kind(made)}.")
            return made

        return make

    def _batch(self) -> Callable[[], Batch]:
        if self.batch is None:
            return self._random()
        found, options = names.own(self.batch, "--batch")
        if not callable(found):
            names.none(options, f"--batch {self.batch}, which is no function,")

        def make() -> Batch:
            made = names.call(found, options, f"--batch {self.batch}") if callable(found) else found
            if isinstance(made, DataLoader):
                made = next(iter(made))
            if not isinstance(made, (tuple, list)) or len(made) != 2:
                several = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
                raise ValueError(
                    f"varreg: --batch {self.batch} must give (inputs, targets), and gave {_kind(made)}{several}. Several inputs are "
                    "a tuple or a dict of tensors: ((a, b), targets)."
                )
            return made[0], made[1]

        return make

    def _random(self) -> Callable[[], Batch]:
        if self.input is None or self.classes is None:
            raise ValueError(
                "varreg: --model needs a batch: --batch package.module:function, which returns (inputs, targets), or the shape "
                "of an input and the number of classes, as in --input 3,32,32 --classes 10 --batch-size 64."
            )
        try:
            shape = [int(size) for size in self.input.split(",")]
        except ValueError:
            shape = []
        if not shape or min(shape) < 1:
            raise ValueError(f"varreg: --input must be the shape of one input, as in 3,32,32; got {self.input!r}.")
        return images(64 if self.batch_size is None else self.batch_size, *shape, classes=self.classes)

    def _loss(self) -> Callable[..., Tensor]:
        if self.loss is None:
            return F.cross_entropy
        found, options = names.own(self.loss, "--loss")
        if isinstance(found, type):  # torch.nn:CrossEntropyLoss
            found, options = names.call(found, options, f"--loss {self.loss}"), {}
        if not callable(found):
            raise ValueError(f"varreg: --loss {self.loss} must be a function of output and targets; got {_kind(found)}.")
        return functools.partial(found, **options)


def _kind(found: Any) -> str:
    return "None" if found is None else type(found).__name__


def check(w: Workload, own: Own) -> None:
    """Before anything is timed: is there a batch, does the model take it, and is the loss of the result a mean over samples?"""
    model, x, y = built(w)
    sizes = {len(t) if t.dim() else 0 for t in tree_leaves((x, y)) if isinstance(t, Tensor)}
    has_both = all(any(isinstance(t, Tensor) for t in tree_leaves(tree)) for tree in (x, y))
    if len(sizes) != 1 or min(sizes) < 2 or not has_both:
        shapes = tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else _kind(t), (x, y))
        raise ValueError(
            f"varreg: the batch must be tensors with one row for each of two or more samples; got {shapes[0]} as inputs and {shapes[1]} as targets."
        )
    model.eval()  # without randomness, and BatchNorm has the observer's words to come
    try:
        output = call(model, x)
    except Exception as error:
        raise ValueError(f"varreg: --model {own.model} does not take the batch ({type(error).__name__}: {error}).") from error
    name = "--loss " + (own.loss or "torch.nn.functional:cross_entropy, the default,")
    try:
        loss = w.loss(output, y)
    except Exception as error:
        shapes = tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else _kind(t), (output, y))
        raise ValueError(
            f"varreg: {name} cannot be used on an output of shape {shapes[0]} and targets of shape {shapes[1]} "
            f"({type(error).__name__}: {error}). Name another: --loss package.module:function."
        ) from error
    if isinstance(loss, Tensor) and not loss.dim() and not loss.isfinite():
        raise ValueError(f"varreg: {name} is {loss.item()}: there is nothing to measure in such a gradient.")
    check_loss(w.loss, loss, output, y, name)
    if not loss.requires_grad:
        raise ValueError(f"varreg: {name} does not depend on any parameter of --model {own.model}.")
