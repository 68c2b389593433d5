"""Gradient statistics in a training loop's log."""

from __future__ import annotations

from typing import Protocol

from varreg.engine import Observer
from varreg.optim.regularized import Regularized


class Writer(Protocol):
    """What is asked of a writer: `torch.utils.tensorboard.SummaryWriter` has it, and many others do."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def log(writer: Writer, step: int, observer: Observer | None = None, optimizer: Regularized | None = None) -> None:
    """Write ρ, signal-to-noise ratio and noise scale of every layer and of the model; and, given a regularized optimizer, λ of every parameter.

    Call it after `optimizer.step()`, before gradients are cleared. Tags are `rho/conv1`, `snr/conv1`, `noise_scale/conv1` (and `rho`, … for the
    whole model), `lambda/conv1.weight/mean`, …/`effective`, …/`q10`, `q50`, `q90` (and `lambda/mean`, … for all). A noise scale is infinite
    where the signal drowns in the noise.

    >>> import torch, varreg
    >>> class Printer:
    ...     def add_scalar(self, tag, value, step):
    ...         print(tag, round(value, 3), step)
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> observer = varreg.observe(model)
    >>> model(torch.tensor([[1.0], [3.0]])).mean().backward()
    >>> log(Printer(), 7, observer)
    rho/weight 0.25 7
    snr/weight 2.0 7
    noise_scale/weight 0.667 7
    rho 0.25 7
    snr 2.0 7
    noise_scale 0.667 7
    """
    if observer is None and optimizer is None:
        raise ValueError("varreg: log() needs an observer, a regularized optimizer, or both; got neither.")
    if optimizer is not None and not isinstance(optimizer, Regularized):
        raise ValueError(f"varreg: {type(optimizer).__name__} has no λ to log; leave `optimizer` out, and give the observer.")
    values = observer.summary().as_dict() if observer is not None else {}
    values |= optimizer.lambda_summary().as_dict() if optimizer is not None else {}
    for tag, value in values.items():
        writer.add_scalar(tag, value, step)
