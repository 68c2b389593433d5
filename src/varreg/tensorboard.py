"""Gradient statistics in a training loop's log."""

from __future__ import annotations

import math
from typing import Protocol

from varreg.engine import Observer
from varreg.errors import VarregError
from varreg.optim.base import Regularized


class Writer(Protocol):
    """The interface that `log` needs of a writer. `torch.utils.tensorboard.SummaryWriter` and many
    others have it.
    """

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def log(
    writer: Writer,
    step: int,
    observer: Observer | None = None,
    optimizer: Regularized | None = None,
    *,
    layers: bool = False,
) -> None:
    """Write ρ, signal-to-noise ratio and noise scale of the model; and, given a regularized
    optimizer, λ. With `layers`, also write the statistics of every layer, and λ of every parameter.

    Call it after `optimizer.step()`, before gradients are cleared. Tags are `rho`, `snr`,
    `noise_scale`, `trace`, `signal`, `lambda/mean`, `lambda/effective`, `lambda/q10`, `q50` and
    `q90`; with layers, also `rho/conv1`, … and `lambda/conv1.weight/mean`, … All are of one batch.
    Values that are not finite are left out: the noise scale of one batch is infinite if no signal
    is found in the noise. `varreg.callbacks.TensorBoard` logs a usable noise scale, from many
    batches.

    Args:
        writer: A `SummaryWriter`, or any object with its `add_scalar`.
        step: The step that the values are written for.
        observer: The observer that `varreg.observe` returned, or None.
        optimizer: One of varreg's optimizers, or None.
        layers: Whether to write the values of every layer, too.

    >>> import torch, varreg
    >>> class Printer:
    ...     def add_scalar(self, tag, value, step):
    ...         print(tag, round(value, 3), step)
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> observer = varreg.observe(model)
    >>> model(torch.tensor([[1.0], [3.0]])).mean().backward()
    >>> varreg.tensorboard.log(Printer(), 7, observer)
    rho 0.25 7
    snr 2.0 7
    noise_scale 0.667 7
    trace 2.0 7
    signal 3.0 7

    """
    if observer is None and optimizer is None:
        raise VarregError(
            "varreg: log() needs an observer, a regularized optimizer, or both; got neither."
        )
    if optimizer is not None and not isinstance(optimizer, Regularized):
        raise VarregError(
            f"varreg: {type(optimizer).__name__} has no λ to log; leave `optimizer` out, and give "
            "the observer."
        )
    if not hasattr(writer, "add_scalar"):
        raise VarregError(
            "varreg: log() expects a writer with add_scalar(tag, value, step), as "
            f"torch.utils.tensorboard.SummaryWriter; got {type(writer).__name__}."
        )
    if observer is not None and not isinstance(observer, Observer):
        raise VarregError(
            "varreg: log() expects the observer that varreg.observe(model) returns, got "
            f"{type(observer).__name__}."
        )
    values = observer.summary(layers).as_dict() if observer is not None else {}
    values |= optimizer.lambda_summary(parameters=layers).as_dict() if optimizer is not None else {}
    for tag, value in values.items():
        if math.isfinite(value):
            writer.add_scalar(tag, value, step)
