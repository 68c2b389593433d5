"""A batch as `varreg.verify` is given it: what the model takes, what the loss takes, and some of its samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from varreg.engine.arguments import tensors_of

Loss = Callable[..., Any]


class Data:
    """Inputs and targets of a batch, and how to take samples out of them."""

    def __init__(self, loss: Loss | None, batch: Any, batch_dim: int):
        self.batch_dim = batch_dim
        self.x, self.y, self.has_targets = _inputs_and_targets(loss, batch)
        fit = [t for t in tensors_of(self.x) if t.dim() > batch_dim]
        if not fit:
            raise ValueError(
                f"varreg: verify expects an input tensor with samples along dimension {batch_dim}; "
                f"got {_shapes(self.x)} as inputs."
            )
        self.size = fit[0].shape[batch_dim]
        if not self.size:
            raise ValueError(
                "varreg: verify expects a batch with samples in it, got "
                f"{_shapes(self.x)} as inputs: dimension {batch_dim} is empty."
            )
        targets = tensors_of(self.y)
        if targets and all(self._dim_of(t, True) is None for t in targets):
            raise ValueError(
                f"varreg: verify expects targets for {self.size} samples, as many as the inputs "
                f"have in dimension {batch_dim}; got {_shapes(self.y)} as targets and "
                f"{_shapes(self.x)} as inputs."
            )

    def _dim_of(self, t: Tensor, is_target: bool) -> int | None:
        """Return the dimension that counts samples, if there is one."""
        for dim in (self.batch_dim, 0) if is_target else (self.batch_dim,):
            if t.dim() > dim and t.shape[dim] == self.size:
                return dim
        return None

    def take(self, index: Sequence[int]) -> Data:
        """Return a batch of these samples. What does not count samples is everybody's."""

        def pick(is_target: bool) -> Callable[[Any], Any]:
            def one(t: Any) -> Any:
                dim = self._dim_of(t, is_target) if isinstance(t, Tensor) else None
                return t if dim is None else t.index_select(dim, torch.tensor(index, device=t.device))

            return one

        taken = copy.copy(self)
        taken.x, taken.y = tree_map(pick(False), self.x), tree_map(pick(True), self.y)
        taken.size = len(index)
        return taken

    def few(self, most: int) -> Few:
        """Return some of the samples, spread evenly.

        As many as a tensor has rows that is everybody's would be taken for samples by the engine.
        """
        shared = {
            t.shape[self.batch_dim] for t in tensors_of(self.x) if t.dim() > self.batch_dim and self._dim_of(t, False) is None
        }
        count = min(most, self.size)
        if count < self.size:
            count = next((k for k in range(count, 1, -1) if k not in shared), count)
        index = [i * self.size // count for i in range(count)]
        return Few(self.take(index), [self.take([i]) for i in index], index, self.size)

    def to(self, dtype: torch.dtype) -> Data:
        def cast(t: Any) -> Any:
            return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

        cast_data = copy.copy(self)
        cast_data.x, cast_data.y = tree_map(cast, self.x), tree_map(cast, self.y)
        return cast_data

    def output(self, model: nn.Module) -> Any:
        if isinstance(self.x, dict):
            return model(**self.x)
        return model(*self.x) if isinstance(self.x, tuple) else model(self.x)

    def loss(self, loss: Loss | None, output: Any) -> Tensor:
        """Return the loss, checked to be one number that depends on something."""
        if loss is not None:
            found = loss(output, self.y) if self.has_targets else loss(output)
            what = "a loss that is a single number"
        else:
            found = output.loss if getattr(output, "loss", None) is not None else output
            found = output["loss"] if isinstance(output, dict) and "loss" in output else found
            what = "an output that is a single number or has one as its .loss, since no loss was given"
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"varreg: verify expects {what}; got {got}.")
        if not found.requires_grad:
            raise InputError("varreg: verify expects a loss that depends on parameters of the model.")
        return found.reshape(())


class Few(NamedTuple):
    """Some samples of a batch."""

    whole: Data
    singles: list[Data]
    which: list[int]
    total: int
    """How many there are in the batch."""

    def to(self, dtype: torch.dtype) -> Few:
        singles = [data.to(dtype) for data in self.singles]
        return self._replace(whole=self.whole.to(dtype), singles=singles)


class InputError(Exception):
    """What the user gave cannot be used: raised as a `ValueError`, not reported."""


def _inputs_and_targets(loss: Loss | None, batch: Any) -> tuple[Any, Any, bool]:
    """Return the model's arguments, the targets, and whether there are any."""
    if isinstance(batch, Mapping):
        return dict(batch), None, False
    if loss is None:
        return tuple(batch) if isinstance(batch, (tuple, list)) else batch, None, False
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        raise ValueError(
            f"varreg: verify expects a batch (inputs, targets), or a dict of keyword arguments; got "
            f"{got}. Several inputs are a tuple: ((a, b), targets)."
        )
    x, y = batch
    x = dict(x) if isinstance(x, Mapping) else tuple(x) if isinstance(x, (tuple, list)) else x
    return x, y, True


def _shapes(tree: Any) -> Any:
    return tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__, tree)
