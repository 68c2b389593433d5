"""A user's model as a workload: build it from the arguments of the command line, and check it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from varreg._torch import tree_leaves, tree_map
from varreg.errors import VarregError
from varreg.lab import specs
from varreg.lab.bench.workloads import Batch, Workload, built, call, images
from varreg.lab.tasks.check_task import check_loss


class UserWorkload(NamedTuple):
    """The arguments of the command line for a user's model, as text, so that another process can
    build the same.
    """

    model: str
    batch: str | None = None
    loss: str | None = None
    input: str | None = None
    classes: int | None = None
    batch_size: int | None = None

    def workload(self) -> Workload:
        """Build the workload and check that it can be trained."""
        made = Workload(self.model, self._model(), self._batch(), self._loss())
        check(made, self)
        return made

    def _model(self) -> Callable[[], nn.Module]:
        """Return a function that makes the model."""
        imported, options = specs.resolve(self.model, "--model")
        if isinstance(imported, nn.Module):
            specs.refuse_options(options, f"--model {self.model}, a model that exists already,")
            return functools.partial(copy.deepcopy, imported)
        if not callable(imported):
            raise VarregError(
                f"varreg: --model {self.model} must be a class or function that makes a model, or "
                f"a model; got {_kind(imported)}."
            )

        def make() -> nn.Module:
            made = specs.call(imported, options, f"--model {self.model}")
            if not isinstance(made, nn.Module):
                raise VarregError(
                    f"varreg: --model {self.model} must make a torch.nn.Module, and made "
                    f"{_kind(made)}."
                )
            return made

        return make

    def _batch(self) -> Callable[[], Batch]:
        """Return a function that makes the batch."""
        if self.batch is None:
            return self._random()
        imported, options = specs.resolve(self.batch, "--batch")
        if not callable(imported):
            specs.refuse_options(options, f"--batch {self.batch}, which is not a function,")

        def make() -> Batch:
            made = (
                specs.call(imported, options, f"--batch {self.batch}")
                if callable(imported)
                else imported
            )
            if isinstance(made, DataLoader):
                made = next(iter(made))
            if not isinstance(made, (tuple, list)) or len(made) != 2:
                several = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
                raise VarregError(
                    f"varreg: --batch {self.batch} must give (inputs, targets), and gave "
                    f"{_kind(made)}{several}. Several inputs are "
                    "a tuple or a dict of tensors: ((a, b), targets)."
                )
            return made[0], made[1]

        return make

    def _random(self) -> Callable[[], Batch]:
        """Return a function that draws a random batch of the given shape."""
        if self.input is None or self.classes is None:
            raise VarregError(
                "varreg: --model needs a batch: --batch package.module:function, which returns "
                "(inputs, targets), or the shape "
                "of an input and the number of classes, as in --input 3,32,32 --classes 10 "
                "--batch-size 64."
            )
        try:
            shape = [int(size) for size in self.input.split(",")]
        except ValueError:
            shape = []
        if not shape or min(shape) < 1:
            raise VarregError(
                "varreg: --input must be the shape of one input, as in 3,32,32; got "
                f"{self.input!r}."
            )
        return images(
            64 if self.batch_size is None else self.batch_size, *shape, classes=self.classes
        )

    def _loss(self) -> Callable[..., Tensor]:
        """Return the loss, a function of output and targets."""
        if self.loss is None:
            return F.cross_entropy
        imported, options = specs.resolve(self.loss, "--loss")
        if isinstance(imported, type):  # torch.nn:CrossEntropyLoss
            imported, options = specs.call(imported, options, f"--loss {self.loss}"), {}
        if not callable(imported):
            raise VarregError(
                f"varreg: --loss {self.loss} must be a function of output and targets; got "
                f"{_kind(imported)}."
            )
        return functools.partial(imported, **options)


def workload_of_command(
    model: str | None,
    batch: str | None,
    loss: str | None,
    input: str | None,
    classes: int | None,
    batch_size: int | None,
) -> UserWorkload | None:
    """Return the user's workload, or None if the command line names no model; raise a VarregError
    if its options contradict each other.
    """
    random = {"--input": input, "--classes": classes, "--batch-size": batch_size}
    given = {"--batch": batch, "--loss": loss, **random}
    alone = [name for name, value in given.items() if value is not None]
    if model is None:
        if alone:
            raise VarregError(
                f"varreg: {alone[0]} is for a model of your own: --model package.module:name."
            )
        return None
    parts = [name for name, value in random.items() if value is not None]
    if batch is not None and parts:
        raise VarregError(
            f"varreg: --batch gives the whole batch, and {parts[0]} a part of a random one. Leave "
            "one of them out."
        )
    return UserWorkload(model, batch, loss, input, classes, batch_size)


def _kind(value: Any) -> str:
    """Return the kind of a value in one word."""
    return "None" if value is None else type(value).__name__


def check(w: Workload, user: UserWorkload) -> None:
    """Raise a VarregError, before anything is timed, unless there is a batch, the model takes it,
    and the loss is a mean over samples.
    """
    model, x, y = built(w)
    sizes = {len(t) if t.dim() else 0 for t in tree_leaves((x, y)) if isinstance(t, Tensor)}
    has_both = all(any(isinstance(t, Tensor) for t in tree_leaves(tree)) for tree in (x, y))
    if len(sizes) != 1 or min(sizes) < 2 or not has_both:
        shapes = tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else _kind(t), (x, y))
        raise VarregError(
            "varreg: the batch must be tensors with one row for each of two or more samples; got "
            f"{shapes[0]} as inputs and {shapes[1]} as targets."
        )
    model.eval()  # without randomness; the observer will refuse BatchNorm
    try:
        output = call(model, x)
    except Exception as error:
        raise VarregError(
            f"varreg: --model {user.model} does not take the batch ({type(error).__name__}: "
            f"{error})."
        ) from error
    name = "--loss " + (user.loss or "torch.nn.functional:cross_entropy, the default,")
    try:
        loss = w.loss(output, y)
    except Exception as error:
        shapes = tree_map(
            lambda t: tuple(t.shape) if isinstance(t, Tensor) else _kind(t), (output, y)
        )
        raise VarregError(
            f"varreg: {name} cannot be used on an output of shape {shapes[0]} and targets of shape "
            f"{shapes[1]} "
            f"({type(error).__name__}: {error}). Name another: --loss package.module:function."
        ) from error
    if isinstance(loss, Tensor) and not loss.dim() and not loss.isfinite():
        raise VarregError(
            f"varreg: {name} is {loss.item()}: there is nothing to measure in such a gradient."
        )
    check_loss(w.loss, loss, output, y, name)
    if not loss.requires_grad:
        raise VarregError(
            f"varreg: {name} does not depend on any parameter of --model {user.model}."
        )
