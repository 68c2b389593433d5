"""Batches of inputs and targets: select samples, and call model and loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varreg._torch import tree_map
from varreg.engine.trace.arguments import tensors_of
from varreg.errors import VarregError

Loss = Callable[..., Any]


class Batch:
    """Inputs of the model, and targets of the loss."""

    def __init__(self, loss: Loss | None, batch: Any, batch_dim: int):
        self.batch_dim = batch_dim
        self.x, self.y, self.has_targets = _inputs_and_targets(loss, batch)
        carriers = [t for t in tensors_of(self.x) if t.dim() > batch_dim]
        if not carriers:
            raise VarregError(
                f"varreg: verify expects an input tensor with samples along dimension {batch_dim}; "
                f"got {_shapes(self.x)} as inputs."
            )
        self.size = carriers[0].shape[batch_dim]
        if not self.size:
            raise VarregError(
                "varreg: verify expects a batch with samples in it, got "
                f"{_shapes(self.x)} as inputs: dimension {batch_dim} is empty."
            )
        targets = tensors_of(self.y)
        if targets and all(self._dim_of(t, True) is None for t in targets):
            raise VarregError(
                f"varreg: verify expects targets for {self.size} samples, as many as the inputs "
                f"have in dimension {batch_dim}; got {_shapes(self.y)} as targets and "
                f"{_shapes(self.x)} as inputs."
            )

    def _dim_of(self, t: Tensor, is_target: bool) -> int | None:
        """Return the dimension that counts samples; None if no dimension does."""
        for dim in (self.batch_dim, 0) if is_target else (self.batch_dim,):
            if t.dim() > dim and t.shape[dim] == self.size:
                return dim
        return None

    def take(self, index: Sequence[int]) -> Batch:
        """Return a batch of these samples. A tensor without a dimension of samples is not
        changed.
        """

        def pick(is_target: bool) -> Callable[[Any], Any]:
            def one(t: Any) -> Any:
                if not isinstance(t, Tensor):
                    return t
                dim = self._dim_of(t, is_target)
                if dim is None:
                    return _apart(t, t)
                return _apart(t.index_select(dim, torch.tensor(index, device=t.device)), t)

            return one

        batch = copy.copy(self)
        batch.x, batch.y = tree_map(pick(False), self.x), tree_map(pick(True), self.y)
        batch.size = len(index)
        return batch

    def select(self, most: int) -> Selection:
        """Return some of the samples, spread evenly.

        Their number must differ from the length of a tensor that all samples share: otherwise the
        engine would mistake the rows of that tensor for samples.
        """
        shared = {
            t.shape[self.batch_dim]
            for t in tensors_of(self.x)
            if t.dim() > self.batch_dim and self._dim_of(t, False) is None
        }
        count = min(most, self.size)
        if count < self.size:
            count = next((k for k in range(count, 1, -1) if k not in shared), count)
        index = [i * self.size // count for i in range(count)]
        return Selection(self.take(index), [self.take([i]) for i in index], index, self.size)

    def to(self, dtype: torch.dtype) -> Batch:
        """Return a copy whose floating-point tensors are of another type."""

        def cast(t: Any) -> Any:
            is_number = isinstance(t, Tensor) and t.is_floating_point()
            return _apart(t.to(dtype), t) if is_number else t

        batch = copy.copy(self)
        batch.x, batch.y = tree_map(cast, self.x), tree_map(cast, self.y)
        return batch

    def output(self, model: nn.Module) -> Any:
        """Return the output of the model for the inputs."""
        if isinstance(self.x, dict):
            return model(**self.x)
        return model(*self.x) if isinstance(self.x, tuple) else model(self.x)

    def loss(self, loss: Loss | None, output: Any) -> Tensor:
        """Return the loss. Raise an InputError unless it is one number that depends on
        parameters.
        """
        if loss is not None:
            value = loss(output, self.y) if self.has_targets else loss(output)
            expected = "a loss that is a single number"
        else:
            value = output.loss if getattr(output, "loss", None) is not None else output
            value = output["loss"] if isinstance(output, dict) and "loss" in output else value
            expected = (
                "an output that is a single number or has one as its .loss, since no loss was given"
            )
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise InputError(f"varreg: verify expects {expected}; got {got}.")
        if not value.requires_grad:
            raise InputError(
                "varreg: verify expects a loss that depends on parameters of the model."
            )
        return value.reshape(())


class Selection(NamedTuple):
    """Some samples of the user's batch."""

    batch: Batch
    """All selected samples together."""
    singles: list[Batch]
    """Each selected sample alone."""
    indices: list[int]
    """Their positions in the user's batch."""
    total: int
    """The number of samples in the user's batch."""

    def to(self, dtype: torch.dtype) -> Selection:
        """Return a copy whose floating-point tensors are of another type."""
        singles = [batch.to(dtype) for batch in self.singles]
        return self._replace(batch=self.batch.to(dtype), singles=singles)


class InputError(Exception):
    """The user's loss or batch cannot be used. It is raised as a `ValueError`, not reported in a
    result.
    """


def _apart(t: Tensor, given: Tensor) -> Tensor:
    """Return a tensor that was made of a `given` one, without the graph behind it: each step has a
    graph of its own. A parameter stays itself, since it may be one of the model.
    """
    if not given.requires_grad or isinstance(t, nn.Parameter):
        return t
    return t.detach().requires_grad_()


def _inputs_and_targets(loss: Loss | None, batch: Any) -> tuple[Any, Any, bool]:
    """Return the model's arguments, the targets, and whether there are targets."""
    if isinstance(batch, Mapping):
        return dict(batch), None, False
    if loss is None:
        return tuple(batch) if isinstance(batch, (tuple, list)) else batch, None, False
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = type(batch).__name__ + (
            f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        )
        raise VarregError(
            "varreg: verify expects a batch (inputs, targets), or a dict of keyword arguments; "
            f"got {got}. Several inputs are a tuple: ((a, b), targets)."
        )
    x, y = batch
    x = dict(x) if isinstance(x, Mapping) else tuple(x) if isinstance(x, (tuple, list)) else x
    return x, y, True


def _shapes(tree: Any) -> Any:
    """Return the tree with the shapes of tensors and the types of anything else."""
    return tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__, tree)
