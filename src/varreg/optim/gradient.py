"""Find out whether gradients were clipped or unscaled between `backward()` and `step()`, and adapt
the variance.

Coupled weight decay is in `increments.py` (`coupled_decay`), decoupled weight decay in `step.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varreg import _torch
from varreg.devices import widest
from varreg.engine import Moments, deferred
from varreg.shards import local
from varreg.thresholds import PARALLEL, ROOM

if TYPE_CHECKING:
    from varreg.optim.parameter_step import ParameterStep


class UnmeasuredError(Exception):
    """The gradient is not the one that was measured."""


class NotFiniteError(Exception):
    """There is an infinity or a nan in a gradient."""


class OverflowedError(Exception):
    """The gradient is finite, but its squares are not."""


def products(m: Moments, grad: Tensor) -> Tensor:
    """Return S·S, g·S, g·g and ΣW of a shard. They compare a gradient g with the measured one, S.
    The products of a parameter are the sums over its shards.

    For shards, only these products show whether a gradient was changed. So they are in double
    precision, if the device has it: rounding must not look like a change.
    """
    S, g = widest(m.total.reshape(-1)), widest(grad.reshape(-1))
    SS, W = torch.dot(S, S), m.square.sum().to(S.dtype)
    if grad is m.total:  # all three products are the same
        return torch.stack([SS, SS, SS, W])
    return torch.stack([SS, torch.dot(g, S), torch.dot(g, g), W])


def fetch_products(steps: list[ParameterStep]) -> None:
    """Set the products of steps that PyTorch takes, and `base_steps` if the base counts its steps
    on a device. This takes few kernels and one wait for all parameters of a device.
    """
    by_type: dict[Any, list[ParameterStep]] = {}
    for step in steps:
        total = step.measured.total
        by_type.setdefault((total.device, total.dtype), []).append(step)
    alike = list(by_type.values())
    counted = [step for step in steps if _is_on_device(step.state.get("step"))]
    counts = [torch.stack([step.state["step"] for step in counted])] if counted else []
    # a comparison, in fewer kernels, is enough where torch's version counter shows no write
    written = [any(map(_is_written, some)) for some in alike]
    sums = [(_products if w else _gaps)(some) for w, some in zip(written, alike, strict=True)]
    *fetched, numbers = [*deferred.fetch([*sums, *counts]), []][: len(alike) + 1]
    changed = []
    for rows, some, is_written in zip(fetched, alike, written, strict=True):
        if is_written:
            _set_products(some, rows)
        elif not _set_untouched(some, rows):
            changed.append(some)  # gradients were written to without a trace (`p.grad.data`)
    for rows, some in zip(deferred.fetch([*map(_products, changed)]), changed, strict=True):
        _set_products(some, rows)
    for step, number in zip(counted, numbers, strict=True):
        step.base_steps = number + 1  # the base's step comes after this


def _is_written(step: ParameterStep) -> bool:
    """Return whether a gradient was written to since it was measured, according to torch's version
    counter.
    """
    assert step.ledger is not None
    watch = step.ledger.gradient
    return not watch.is_same(step.grad) or watch.is_written(step.grad)


def _gaps(steps: list[ParameterStep]) -> Tensor:
    """Return Σ|g − S| and ΣW, each for all steps: `[2, n]`."""
    S = [step.measured.total for step in steps]
    W = [step.measured.square for step in steps]
    g = [local(step.grad).to(t.dtype) for step, t in zip(steps, S, strict=True)]
    norms = _torch.foreach_norm([*_torch.foreach_sub(g, S), *W], 1)
    return torch.stack([t.to(S[0].dtype) for t in norms])


def _set_untouched(steps: list[ParameterStep], rows: list[float]) -> bool:
    """Set the products of gradients that equal the measured ones. Return whether all do; if not,
    set nothing.

    In place of S·S, its upper bound m·ΣW is used.
    """
    n = len(steps)
    if any(gap != 0 for gap in rows[:n]):
        return False
    for step, W in zip(steps, rows[n:], strict=True):
        most = step.measured.count * W
        step.products = most, most, most, W
    return True


def _set_products(steps: list[ParameterStep], rows: list[float]) -> None:
    for i, step in enumerate(steps):
        SS, gS, negative, gg, W = rows[i :: len(steps)]
        step.products = SS, gS - 2 * negative, gg, W


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu


def _products(steps: list[ParameterStep]) -> Tensor:
    """Return S·S, Σ|gS|, Σ max(−gS, 0), g·g and ΣW, each for all steps: `[5, n]`.

    Sums are computed as 1-norms, since torch has a kernel for the norms of many tensors. A 1-norm
    is the sum if no element is negative. A clipped gradient has the signs of the measured one, so
    gS is not negative, and Σ max(−gS, 0) is 0: the difference loses no digits.
    """
    S = [step.measured.total for step in steps]
    W = [step.measured.square for step in steps]
    g = [local(step.grad).to(t.dtype) for step, t in zip(steps, S, strict=True)]
    norms = list(_torch.foreach_norm(_torch.foreach_mul(S, S), 1))
    gS = _torch.foreach_mul(g, S)
    norms += _torch.foreach_norm(gS, 1)
    _torch.foreach_clamp_max_into(gS, 0.0)
    norms += _torch.foreach_norm(gS, 1)
    del gS
    norms += _torch.foreach_norm(_torch.foreach_mul(g, g), 1)
    norms += _torch.foreach_norm(W, 1)
    return torch.stack([t.to(S[0].dtype) for t in norms])


def as_seen(
    m: Moments,
    grad: Tensor,
    compared: Sequence[float],
    is_same_tensor: bool,
    precision: float = 0.0,
) -> tuple[Tensor, Tensor | float]:
    """Return the gradient as the optimizer sees it, in the precision of the moments, and κ²: the
    variance of this gradient is κ²v².

    The gradient is `m.total` if it was not changed, otherwise `grad` itself if the precision is the
    same. It is not a copy.

    Clipping and unscaling change the gradient from S to κS, one κ for the tensor, and so its
    variance to κ²v². Clipping by value has a κ for each element. Both leave ρ = v²/ḡ² unchanged.
    `is_same_tensor` says whether `grad` is the measured tensor, changed or not; another tensor must
    be a multiple of the measured one. `precision` is the rounding error of the gradient, if it was
    computed in a coarser type than its own (for example autograd's gradient of an LSTM under
    autocast).
    """
    SS, gS, gg, W = compared
    # this holds for sums in double precision, too: then g·S is in double precision as well
    finite = SS + gg + m.count * W <= largest_sum(m.total.dtype)
    if finite and gS == SS == gg:  # the gradient was not changed
        return m.total, 1.0
    S, g = m.total.reshape(-1), grad.to(m.total.dtype).reshape(-1)
    if not finite:
        raise (
            OverflowedError
            if bool(g.isfinite().all()) and bool(S.isfinite().all())
            else NotFiniteError
        )
    if SS == 0:  # the measured gradient is 0: all of g was added after backward()
        return g.view_as(grad), 1.0
    kappa = gS / SS
    eps = max(rounding_of(grad.dtype), precision)
    across = gg - kappa * gS  # the squared part of g that is orthogonal to S
    rounding = PARALLEL * torch.finfo(S.dtype).eps * gg + (eps * kappa) ** 2 * m.count * W
    if across <= rounding:  # parallel
        return g.view_as(grad), kappa**2
    if not is_same_tensor:
        raise UnmeasuredError
    return g.view_as(grad), _by_element(g, S, kappa**2).view_as(grad)


@functools.cache
def rounding_of(dtype: torch.dtype) -> float:
    """Return the unit of rounding of a type."""
    return torch.finfo(dtype).eps


@functools.cache
def largest_sum(dtype: torch.dtype) -> float:
    """Return the largest allowed sum of squares; it leaves room for sums over steps."""
    return torch.finfo(dtype).max * ROOM


def _by_element(g: Tensor, S: Tensor, overall: float) -> Tensor:
    """Return κ² of each element, (g/S)².

    Clipping by value leaves several elements with the same, largest absolute value. Their κ² is at
    most that of the others. Any other change of single elements, including rounding, may add
    something to an element. Then (g/S)² is meaningless where S is small. So κ² is limited to the
    median over the elements that are not 0 and were not clipped.
    """
    each = (g / S).square_().nan_to_num_(nan=overall, posinf=overall)
    size = g.abs()
    largest = size == size.max()
    clipped = largest & (largest.sum() > 1)
    others = each.masked_fill((each <= 0) | clipped, torch.nan)
    return torch.fmin(each, others.nanmedian())
