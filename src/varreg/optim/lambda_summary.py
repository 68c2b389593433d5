"""Summaries of λ for people and logs: how the last step differed from the base's step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.devices import has_float64
from varreg.tables import table
from varreg.thresholds import LAMBDA_SAMPLE


@dataclass(frozen=True)
class LambdaRow:
    """λ of one parameter, or of the whole model."""

    name: str
    elements: int
    mean: float
    effective: float
    """Effective λ: the mean weighted by squared gradients, that is, the factor of the learning rate
    that would make plain steps about as long. nan after gradients are cleared.
    """
    quantiles: tuple[float, float, float]
    """10 %, 50 %, 90 %."""
    silent: int = 0
    """The number of elements that never had a gradient. Mean and quantiles leave them out."""


@dataclass(frozen=True)
class LambdaSummary:
    """Rows per parameter, and one for all parameters together (None if the last step had no λ).
    `print` it.
    """

    parameters: list[LambdaRow]
    model: LambdaRow | None

    def as_dict(self, prefix: str = "lambda") -> dict[str, float]:
        """Return flat numbers for a logger: `lambda/conv1.weight/mean`, …/`effective`, …/`q10`,
        `q50`, `q90`; `lambda/mean`, … for all.

        The dict is empty if the last step had no λ.
        """
        rows = [(f"{prefix}/{r.name}", r) for r in self.parameters]
        rows += [(prefix, self.model)] if self.model else []
        names = ("mean", "effective", "q10", "q50", "q90")
        return {
            f"{at}/{name}": x
            for at, r in rows
            for name, x in zip(names, (r.mean, r.effective, *r.quantiles), strict=True)
        }

    def __str__(self) -> str:
        if self.model is None:
            return (
                "varreg: no λ: no step yet, or the last one was plain (s = 0, a batch of one, no "
                "moments, or a gradient that is not finite)."
            )
        head = ("parameter", "elements", "mean λ", "effective", "10 %", "50 %", "90 %")
        shown = table(head, [self._cells(r) for r in (*self.parameters, self.model)])
        if silent := self.model.silent:
            shown += f"\n{silent:,} elements never had a gradient: they are in no mean or quantile."
        return shown

    @staticmethod
    def _cells(r: LambdaRow) -> tuple[str, ...]:
        return (
            r.name,
            f"{r.elements:,}",
            *(f"{x:.3f}" for x in (r.mean, r.effective, *r.quantiles)),
        )


def _row(name: str, lam: Tensor, square: Tensor | None, known: Tensor) -> LambdaRow:
    effective = (
        float((lam * square).sum() / square.sum())
        if square is not None and square.any()
        else math.nan
    )
    silent = int((~known).sum())
    flat = (lam[known] if 0 < silent < len(lam) else lam).sort().values
    return LambdaRow(name, len(lam), float(flat.mean()), effective, _quantiles(flat), silent)


Named = tuple[str, Tensor, "Tensor | None", "Tensor | None", int]
"""A parameter's name, λ, gradient, count of steps with a ρ (per element), and number of
elements.
"""


def _known(lam: Tensor, grad: Tensor | None, count: Tensor | None, n: int) -> Tensor:
    """Return a mask of the elements that have, or ever had, a gradient. The other elements never
    moved, and their λ is 1.
    """
    if count is None or not lam.dim():
        return lam.new_ones((n,), dtype=torch.bool)
    known = count.expand(lam.shape).reshape(-1) > 0  # all elements may share one count
    return known if grad is None else known | (grad.reshape(-1) != 0)


def overview(named: list[Named]) -> LambdaSummary:
    """Return the summary of λ of the whole model alone. The quantiles are those of up to
    `LAMBDA_SAMPLE` evenly spaced elements.
    """
    named = [row for row in named if row[-1]]
    if not named:
        return LambdaSummary([], None)
    elements = sum(n for *_, n in named)
    every = math.ceil(elements / LAMBDA_SAMPLE)
    sums, sample, first = [], [], 0  # `first`: position of the next element of the sample
    for _, lam, grad, count, n in named:
        each = lam.reshape(-1).expand(n)  # all elements may share one λ
        known, nothing = _known(lam, grad, count, n), each.new_tensor(math.nan)
        square = nothing if grad is None else grad.reshape(-1).to(each.dtype).square()
        parts = (each * known, square * each, square, known.to(each.dtype))
        sums.append(torch.stack([_sum(part) for part in parts]))
        sample.append(torch.where(known[first::every], each[first::every], nothing))
        first = (first - n) % every
    home = sums[0].device  # one transfer to the CPU for all sums
    total, weighted, weight, moved = torch.stack([x.to(home) for x in sums]).sum(0).tolist()
    some = torch.cat([x.to(home) for x in sample]).cpu().double()
    some = some[~some.isnan()].sort().values
    if not len(some):
        some = some.new_ones(1)
    effective = weighted / weight if weight else math.nan
    mean, silent = total / moved if moved else 1.0, elements - round(moved)
    row = LambdaRow("all", elements, mean, effective, _quantiles(some), silent)
    return LambdaSummary([], row)


def _sum(t: Tensor) -> Tensor:
    return t.sum(dtype=torch.float64 if has_float64(t.device) else None)


def _quantiles(ordered: Tensor) -> tuple[float, float, float]:
    n = len(ordered)
    a, b, c = (ordered[min(n - 1, int(q * n))].item() for q in (0.1, 0.5, 0.9))
    return a, b, c


def summarize(named: list[Named]) -> LambdaSummary:
    """Return the summary of λ of parameters. Mean and quantiles leave out elements that never had a
    ρ and have no gradient now: their λ is 1, and they do not move.
    """
    parts = []
    for name, lam, grad, count, n in named:
        each = lam.double().expand(n) if lam.dim() == 0 else lam.double().reshape(-1)
        known = _known(lam, grad, count, n)
        square = None if grad is None else grad.double().reshape(-1).square()
        parts.append((name, each, square, known))
    rows = [_row(*part) for part in parts]
    if not rows:
        return LambdaSummary([], None)
    squares = [square for _, _, square, _ in parts if square is not None]
    whole = torch.cat(squares) if len(squares) == len(parts) else None
    lams = torch.cat([each for _, each, _, _ in parts])
    known = torch.cat([each for _, _, _, each in parts])
    return LambdaSummary(rows, _row("all", lams, whole, known))
