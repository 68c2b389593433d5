"""Moments: m, K, S and W of one parameter → mean, variance and ρ of its per-sample gradients.

`varreg.moments(p)`, which finds the moments of a parameter, is in parameters.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg import few_launches
from varreg.backends import BACKENDS
from varreg.shards import is_sharded
from varreg.thresholds import VARIANCE


@dataclass(frozen=True, repr=False)
class Moments:
    """Mean and variance of the per-sample gradients of one parameter (paper, section 4 and S2.2).

    With S = Σ c_i and W = Σ C_u²/n_u over K groups of the m samples (K = m is the exact case), for
    a loss that is a mean:

        ḡ = S,   v² = (m−1)/(K−1) · (m·W − S²),   ρ = v²/ḡ²

    For a loss that is a sum, ḡ is divided by m and v² by m². For K = m this is v² = (1/m) Σ (g_i −
    ḡ)² to the letter; for fewer groups it has the same expectation when samples are independent and
    alike. ρ depends neither on the reduction nor on any loss scale.
    """

    count: int
    """m: samples since gradients were last cleared, over all micro-batches."""
    groups: int
    """K: groups whose spread was measured; the same as `count` in the exact case."""
    total: Tensor
    """S: the sum of all contributions, which `backward()` added to `p.grad`."""
    square: Tensor
    """W: the sum of the squared contributions of the groups, each over its number of samples."""
    reduction: str = "mean"

    @property
    def mean(self) -> Tensor:
        """Return ḡ = (1/m) Σ g_i."""
        return self.total / self._scale

    @property
    def second_moment(self) -> Tensor:
        """Return (1/m) Σ g_i²; with groups, its estimate v² + ḡ²."""
        if self.groups == self.count:
            return self.square * (self.count / self._scale**2)
        return self.variance + self.mean.square()

    @property
    def variance(self) -> Tensor:
        """Return v² = (1/m) Σ (g_i − ḡ)², which is never negative; a value within rounding errors
        of 0 is 0. It is 0 for a batch of one sample, and nan for one *group* of several samples.
        """
        return self.variance_into(torch.empty_like(self.square))

    @property
    def total_mean_square(self) -> Tensor:
        """Return Σ_p ḡ_p², the square of the length of the mean gradient."""
        return self.mean.square().sum()

    @property
    def total_second_moment(self) -> Tensor:
        """Return Σ_p (1/m) Σ_i g_ip²: the mean square of the length of a sample's gradient."""
        return self.second_moment.sum()

    @property
    def total_variance(self) -> Tensor:
        """Return Σ_p v_p²: `varreg.observe(model, per="model")` measures it alone."""
        return self.variance.sum()

    @property
    def elements(self) -> int:
        """Return the number of the parameter's elements."""
        return self.total.numel()

    def variance_into(self, out: Tensor) -> Tensor:
        """Return the variance; on the CPU, write it to the given memory."""
        if self.count == 1:
            return out.zero_()
        if self.groups < 2:
            return out.fill_(torch.nan)
        factor, rounding = self.constants
        factor /= self._scale**2
        if not is_sharded(out) and BACKENDS[out.device.type].variance(
            self.total, self.square, self.count, factor, rounding, out
        ):
            return out
        # m·W and S² nearly cancel where samples agree: the difference may be rounding
        if out.is_cpu or is_sharded(out):
            size = self.square * (self.count * factor)
            torch.addcmul(size, self.total, self.total, value=-factor, out=out)
            return out.masked_fill_(out <= size.mul_(rounding), 0.0)
        return few_launches.variance(
            self.total, self.square, self.count, factor * self.count, rounding, out
        )

    @property
    def constants(self) -> tuple[float, float]:
        """Return the factor of m·W − S² for a loss that is a mean, and the bound on its rounding
        error relative to m·W.
        """
        units = VARIANCE[0] + VARIANCE[1] * math.sqrt(self.count)
        factor = (self.count - 1) / (self.groups - 1)
        return factor, torch.finfo(self.square.dtype).eps * units

    @property
    def rho(self) -> Tensor:
        """Return ρ = v²/ḡ², the scale-free variance (S2.3). 0/0 is nan and v²/0 is inf; the
        regularizer handles both.

        Where squares are too small for their precision, ρ is nan, since it is not known.
        """
        return (self.variance / self.mean.square()).masked_fill_(
            self.square < torch.finfo(self.square.dtype).tiny, torch.nan
        )

    def __repr__(self) -> str:
        kind = "exact" if self.groups == self.count else f"{self.groups} groups"
        shape = "×".join(map(str, self.total.shape)) or "scalar"
        head = f"Moments(count={self.count}, {kind}, shape {shape}"
        if is_sharded(self.total):
            return f"{head}, sharded)"
        if not self.total.numel():
            return f"{head})"
        rho = self.rho
        middle = float(rho[~rho.isnan()].median()) if (~rho.isnan()).any() else math.nan
        size, spread = float(self.mean.norm()), float(self.variance.mean())
        return f"{head}: |mean| {size:.3g}, mean variance {spread:.3g}, median rho {middle:.3g})"

    @property
    def _scale(self) -> int:
        return 1 if self.reduction == "mean" else self.count
