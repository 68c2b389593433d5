"""λ for people and logs: how far the last step was from the base optimizer's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.tables import table


@dataclass(frozen=True)
class LambdaRow:
    """λ of one parameter, or of the whole model."""

    name: str
    elements: int
    mean: float
    effective: float
    """The mean weighted by the squared gradient: what the learning rate would have to be multiplied with to move as far.
    nan once gradients are cleared."""
    quantiles: tuple[float, float, float]
    """10 %, 50 %, 90 %."""


@dataclass(frozen=True)
class LambdaSummary:
    """Rows per parameter, and one for all of them together, or None where the last step had no λ; `print` it."""

    parameters: list[LambdaRow]
    model: LambdaRow | None

    def as_dict(self, prefix: str = "lambda") -> dict[str, float]:
        """Flat numbers for a logger: `lambda/conv1.weight/mean`, …/`effective`, …/`q10`, `q50`, `q90`; `lambda/mean`, … for all.

        Empty where the last step had no λ.
        """
        rows = [(f"{prefix}/{r.name}", r) for r in self.parameters]
        rows += [(prefix, self.model)] if self.model else []
        names = ("mean", "effective", "q10", "q50", "q90")
        return {f"{at}/{name}": x for at, r in rows for name, x in zip(names, (r.mean, r.effective, *r.quantiles), strict=True)}

    def __str__(self) -> str:
        if self.model is None:
            return "varreg: no λ: no step yet, or the last one was plain (s = 0, a batch of one, no moments, or a gradient that is not finite)."
        head = ("parameter", "elements", "mean λ", "effective", "10 %", "50 %", "90 %")
        return table(head, [self._cells(r) for r in (*self.parameters, self.model)])

    @staticmethod
    def _cells(r: LambdaRow) -> tuple[str, ...]:
        return (r.name, f"{r.elements:,}", *(f"{x:.3f}" for x in (r.mean, r.effective, *r.quantiles)))


def _row(name: str, lam: Tensor, square: Tensor | None) -> LambdaRow:
    effective = float((lam * square).sum() / square.sum()) if square is not None and square.any() else math.nan
    flat = lam.sort().values
    at = [flat[min(len(flat) - 1, int(q * len(flat)))].item() for q in (0.1, 0.5, 0.9)]
    return LambdaRow(name, len(lam), float(lam.mean()), effective, (at[0], at[1], at[2]))


def summarize(named: list[tuple[str, Tensor, Tensor | None, int]]) -> LambdaSummary:
    """From (name, λ, gradient, number of elements) of each parameter."""
    parts = []
    for name, lam, grad, n in named:
        each = lam.double().expand(n) if lam.dim() == 0 else lam.double().reshape(-1)
        parts.append((name, each, None if grad is None else grad.double().reshape(-1).square()))
    rows = [_row(*part) for part in parts]
    if not rows:
        return LambdaSummary([], None)
    squares = [square for _, _, square in parts if square is not None]
    whole = torch.cat(squares) if len(squares) == len(parts) else None
    return LambdaSummary(rows, _row("all", torch.cat([each for _, each, _ in parts]), whole))
