"""The function `verify(model, loss, batch)`, and the checks of its arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from varreg.engine.refusals import check_options
from varreg.errors import VarregError
from varreg.verification.attempts import verify_precisely
from varreg.verification.result import Verification
from varreg.verification.samples import Batch, Loss
from varreg.verification.tolerance import Setting, tolerance_for


def verify(
    model: nn.Module,
    loss: Loss | None,
    batch: Any,
    *,
    reduction: str = "mean",
    batch_dim: int = 0,
    samples: int = 8,
    rtol: float | None = None,
    batch_norm: str = "refuse",
) -> Verification:
    """Compare varreg's moments with their definition: the gradients of single samples.

    A few samples go through model and loss one at a time, which gives their gradients g_i. The
    gradient of the batch of these samples must be the mean of the g_i; varreg's count, mean, second
    moment and variance must be those of the g_i; and `p.grad` must be the same as without varreg.
    If one of these fails, the result says why. Dropout is off. The model, its buffers, gradients
    and observers, and all random states are restored.

    Args:
        model: Any module, observed or not, in training or not.
        loss: A function of output and targets, `loss(model(x), y)`. None: the model computes its
            own, which is `output.loss`, or the output itself if that is a single number.
        batch: A pair `(x, y)`. `x` is a tensor, a tuple of positional arguments, or a dict of
            keyword arguments; `y` is a tensor, or any tree of tensors. A dict in place of the pair
            has all keyword arguments of the model; the loss then gets only the output. If the loss
            is None, a tensor or tuple has all positional arguments of the model.
        reduction: Whether the loss is a `"mean"` or a `"sum"` over samples, as for
            `varreg.observe`.
        batch_dim: The dimension of the model's inputs that counts samples. Targets without such
            a dimension of the batch's size have samples in dimension 0.
        samples: The largest number of samples to use, spread evenly over the batch.
        rtol: The largest gap that is allowed, relative to the size of per-sample gradients. None:
            1e-7 in float64, 1e-3 in float32. Where numbers differ, all is run again in float64, to
            see whether that is rounding.
        batch_norm: As for `varreg.observe`. `"contribution"` cannot be verified.

    Returns:
        A `Verification`: truthy when verified; `print` shows a table.

    >>> import torch, varreg
    >>> import torch.nn.functional as F
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    >>> bool(varreg.verify(model, F.cross_entropy, (x, y)))
    True
    >>> def total(output, y):
    ...     return F.cross_entropy(output, y, reduction="sum")
    >>> varreg.verify(model, total, (x, y)).status
    'different'

    """
    _check_arguments(model, loss, samples, rtol)
    check_options(model, None, reduction, batch_dim, batch_norm)
    data = Batch(loss, batch, batch_dim)
    if not any(p.requires_grad for p in model.parameters()):
        raise VarregError(
            "varreg: verify expects a model with a parameter that requires a gradient; "
            f"{type(model).__name__} has none."
        )
    undefined = _undefined(data.size, batch_norm)
    if undefined is not None:
        return undefined
    setting = Setting(reduction, batch_dim, tolerance_for(model) if rtol is None else rtol)
    selection = data.select(samples)
    with torch.enable_grad():
        return verify_precisely(model, loss, selection, setting)


def _check_arguments(model: Any, loss: Any, samples: Any, rtol: Any) -> None:
    """Raise a VarregError if an argument has a wrong type or value."""
    if not isinstance(model, nn.Module):
        raise VarregError(f"varreg: verify expects a torch.nn.Module, got {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise VarregError(
            f"varreg: verify expects a loss that can be called as loss(model(x), y), or None for a "
            f"model that computes its own; got {type(loss).__name__}."
        )
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise VarregError(f"varreg: verify expects samples of 2 or more, got {samples!r}.")
    if rtol is not None and not (isinstance(rtol, (int, float)) and 0 < rtol < math.inf):
        raise VarregError(f"varreg: verify expects rtol to be a positive number, got {rtol!r}.")


def _undefined(size: int, batch_norm: str) -> Verification | None:
    """Return the result for cases in which single samples have no gradient to compare with; None
    for all other cases.
    """
    if size < 2:
        return Verification(
            "unknown",
            "The batch has one sample, and the variance of one sample is not defined.",
            "Pass a batch of two samples or more.",
        )
    if batch_norm == "contribution":
        return Verification(
            "unknown",
            "batch_norm='contribution' measures shares of a gradient that samples make together: "
            "a single sample has none of its own to compare with.",
        )
    if _is_distributed():
        return Verification(
            "unknown",
            "Several processes share the batch, and moments are those of all of them.",
            "Verify in one process, before torch.distributed is initialized.",
        )
    return None


def _is_distributed() -> bool:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_initialized and torch.distributed.get_world_size() > 1
