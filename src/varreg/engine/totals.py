"""Totals: m, |S|² and ΣW of one parameter → the sums of its moments over elements.

`observe(model, per="model")` and `per="tensor"` keep them in place of `Moments`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from varreg.errors import VarregError
from varreg.thresholds import VARIANCE

PER = "element", "tensor", "model"
"""The values of `per` in `observe`. `"model"` keeps the same sums as `"tensor"`."""


@dataclass(frozen=True, repr=False)
class Totals:
    """Sums over the elements of one parameter of the moments of its per-sample gradients.

    With S = Σ c_i, for a loss that is a mean over m samples:

        Σ_p ḡ_p² = |S|²,   Σ_p v_p² = m·Σ_i |c_i|² − |S|²

    For a loss that is a sum, both are divided by m². `Moments` has the same three properties.
    """

    count: int
    """m: samples since gradients were last cleared, over all micro-batches."""
    groups: int
    """The same as `count`: single samples are measured."""
    length2: Tensor | float
    """|S|²: the square of the length of the sum of all contributions."""
    spread: Tensor | float
    """Σ_i |c_i|²: the sum over samples of the squares of the lengths of their contributions; on a
    device, nan where squares left the range of float32.
    """
    reduction: str
    shape: torch.Size
    """The shape of the parameter."""
    eps: float
    """The unit of rounding of the numbers that were summed up."""
    name: str
    """The name of the parameter."""

    @property
    def total_mean_square(self) -> Tensor:
        """Return Σ_p ḡ_p², the square of the length of the mean gradient."""
        return _tensor(self.length2) / self._scale**2

    @property
    def total_second_moment(self) -> Tensor:
        """Return Σ_p (1/m) Σ_i g_ip²: the mean square of the length of a sample's gradient."""
        return _tensor(self.spread) * (self.count / self._scale**2)

    @property
    def total_variance(self) -> Tensor:
        """Return Σ_p v_p², which is never negative; a value within rounding errors of 0 is 0."""
        if self.count == 1:
            return torch.zeros_like(_tensor(self.spread))
        size = _tensor(self.spread) * self.count
        rest = size - self.length2
        units = VARIANCE[0] + VARIANCE[1] * math.sqrt(self.count)
        return rest.masked_fill(rest <= size * (self.eps * units), 0.0) / self._scale**2

    @property
    def elements(self) -> int:
        """Return the number of the parameter's elements."""
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        if name in _BY_ELEMENT:
            refuse_elements(f"moments('{self.name}').{name}")
        raise AttributeError(name)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        return (
            f"Totals(count={self.count}, shape {shape}: |mean| "
            f"{math.sqrt(float(self.total_mean_square)):.3g}, total variance "
            f"{float(self.total_variance):.3g})"
        )

    @property
    def _scale(self) -> int:
        return 1 if self.reduction == "mean" else self.count


def _tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


_BY_ELEMENT = ("mean", "variance", "second_moment", "rho", "total", "square", "constants")


def refuse_elements(what: str) -> NoReturn:
    """Raise a VarregError: `what` needs moments of each element, but only sums are kept."""
    raise VarregError(
        f"varreg: {what} has a value for each element, and this model is observed with "
        "per='model' or per='tensor', which keep sums over elements alone: total_mean_square, "
        "total_variance and total_second_moment. For single elements, observe the model with "
        "varreg.observe(model)."
    )
