"""ρ and its history ρ̄ (paper, section 4, S1.5 and S2.3), as pure functions.

A history keeps two sums for each element, Ω and n. `record` adds ρ to them, and `average` computes
ρ̄ from them. `TABLE` defines the sums of each kind of history.

Masks are made with arithmetic: `1 + 0·x` is 1 where x is finite and nan elsewhere. On a CPU,
comparing and selecting takes ten times as long as adding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varreg import _torch
from varreg.native import contract
from varreg.options import History
from varreg.thresholds import LARGEST_HISTORY

Memory = Callable[[str, Sequence[int], Tensor], Tensor]
"""A function that returns an uninitialized tensor for a result. Its arguments: a name for the
result, a shape, and a tensor of the same type.
"""


def fresh(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a new tensor that no other code writes to."""
    return like.new_empty(tuple(shape))


class Row(NamedTuple):
    """A row of the table of histories, which keep a sum Ω and a number n."""

    average: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    """Computes ρ̄ from Ω, n and β; writes it to the last argument if that is not None."""
    value: Callable[..., Tensor] | None = None
    """The function of ρ whose values Ω adds up; None for ρ itself."""
    is_exponential: bool = False
    """Whether Ω is an exponential average with the factor β, in place of a sum."""
    kernel: contract.History | None = None


TABLE: dict[History, Row] = {
    "sum": Row(lambda omega, n, beta, out: omega, kernel=contract.History.SUM),
    "mean": Row(
        lambda omega, n, beta, out: torch.div(omega, n, out=out), kernel=contract.History.MEAN
    ),
    "ema": Row(
        lambda omega, n, beta, out: torch.div(omega, 1 - beta**n, out=out), is_exponential=True
    ),
    "geometric": Row(lambda omega, n, beta, out: torch.div(omega, n, out=out).exp_(), torch.log),
    "harmonic": Row(
        lambda omega, n, beta, out: torch.div(n, omega, out=out),
        torch.reciprocal,
        kernel=contract.History.HARMONIC,
    ),
}


def scale_free(
    variance: Tensor, delta: Tensor, limit: float | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ρ = σ²/δ̄² (S2.3), at most `limit`: inf where only δ̄ is 0, nan where both are.

    >>> import torch
    >>> scale_free(torch.tensor([8.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0])).tolist()
    [2.0, inf, nan]
    """
    rho = torch.square(delta, out=out)
    rho = torch.div(variance, rho, out=rho)
    return rho if limit is None else rho.clamp_(max=limit)


def record(
    history: Tensor,
    count: Tensor,
    rho: Tensor,
    kind: History,
    beta: float = 0.99,
    memory: Memory = fresh,
) -> None:
    """Add ρ to the sums of a history, in place, where ρ is finite.

    The sums are Σρ and n; for `"geometric"` Σ log ρ, for `"harmonic"` Σ 1/ρ, both over ρ > 0; for
    `"ema"` βh + (1−β)ρ.
    """
    row = TABLE[kind]
    result, valid = memory("value", rho.shape, rho), memory("valid", rho.shape, rho)
    if row.value is None and not rho.is_cpu:
        value = torch.nan_to_num(rho, nan=0.0, posinf=0.0, neginf=0.0, out=result)
        torch.eq(value, rho, out=valid)  # where it is finite
        _add_to_sums(history, count, value, valid, row, beta)
        return
    value = rho if row.value is None else row.value(rho, out=result)
    torch.add(rho.new_ones(()), rho, alpha=0.0, out=valid)  # 1, or nan where it is not finite
    if value is not rho:
        valid.add_(value, alpha=0.0)
    valid.nan_to_num_(nan=0.0)
    value = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0, out=result)
    _add_to_sums(history, count, value, valid, row, beta)


def _add_to_sums(
    history: Tensor, count: Tensor, value: Tensor, valid: Tensor, row: Row, beta: float
) -> None:
    """Add the values to Ω and n where `valid` is 1; it is 0 elsewhere."""
    if row.is_exponential:
        count.add_(valid)
        history.lerp_(value, valid.mul_(1 - beta))
    else:
        _torch.foreach_add_into([history, count], [value, valid])
        history.clamp_(max=LARGEST_HISTORY)


def average(
    history: Tensor, count: Tensor, kind: History, beta: float = 0.99, out: Tensor | None = None
) -> Tensor:
    """Return ρ̄ of a history's sums: Ω, Ω/n, exp(Ω/n), n/Ω, or h/(1 − βⁿ).

    >>> import torch
    >>> history, count = torch.zeros(1), torch.zeros(1)
    >>> for rho in (1.0, 4.0, float("inf"), float("nan")):  # what is not finite is left out
    ...     record(history, count, torch.tensor([rho]), "harmonic")
    >>> count.item(), round(average(history, count, "harmonic").item(), 6)  # 2/(1 + 1/4)
    (2.0, 1.6)
    """
    return TABLE[kind].average(history, count, beta, out)


def nan_if_unknown(rho: Tensor, present: Tensor, may_write: bool) -> Tensor:
    """Return ρ, and nan where `one_or_nan(present)` is nan."""
    if rho.is_cpu or not may_write:
        return rho * one_or_nan(present)
    return rho.masked_fill_(present <= torch.finfo(present.dtype).tiny, torch.nan)


def one_or_nan(present: Tensor) -> Tensor:
    """Return 1 where the sums of squares W, `present`, are known; nan where no sample had a
    gradient, or W is too small to be precise.
    """
    known = torch.nn.functional.threshold(present, torch.finfo(present.dtype).tiny, torch.nan)
    return known.div_(known)
