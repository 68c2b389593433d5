"""Compute the noise scale and its interval of each layer, from averages over updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varreg.noise.interval import ratio_intervals


@dataclass(frozen=True)
class Reading:
    """The noise scale of one layer, or of the whole model, over the updates of the window."""

    name: str
    noise: float
    """The average of tr Σ; for the ℓ1 version, (Σ_p s_p)² from the average of Σ_p s_p."""
    signal: float
    """The average of |Ĝ|²; for the ℓ1 version, (Σ_p |G_p|)² from the average of its estimate."""
    interval: tuple[float, float]

    @property
    def value(self) -> float:
        """Return B_n: noise over signal; infinite if the signal is not positive."""
        if self.signal > 0 or math.isnan(self.noise):
            return self.noise / self.signal if self.noise > 0 else max(self.noise, 0.0)
        return math.inf if self.noise > 0 else 0.0

    @property
    def text(self) -> str:
        """Return the noise scale in words: "at least …" if the signal is within two standard errors
        of zero.
        """
        low, high = self.interval
        if math.isnan(self.noise):
            return "not measured yet"
        if math.isinf(low):
            return "infinite (no signal at all)"
        if math.isinf(high):
            unknown = "unknown (too few or too different updates)"
            return f"at least {rounded(low)}" if low > 0 else unknown
        return f"{rounded(self.value)} ({rounded(low)} to {rounded(high)})"


def rounded(x: float) -> str:
    """Return a number with two significant digits.

    >>> rounded(1234.5), rounded(17.2), rounded(0.0123)
    ('1,200', '17', '0.012')
    """
    if not x or not math.isfinite(x):
        return f"{x:g}"
    digits = 1 - math.floor(math.log10(abs(x)))
    return f"{round(x, digits):,.{max(0, digits)}f}"


def in_order(rows: Tensor | None, updates: int) -> Tensor:
    """Return the rows that were written, oldest first. Leave out rows that are not finite, for
    example after a loss scale that overflowed.
    """
    if rows is None:
        return torch.empty(0, 0, 5)
    window = len(rows)
    rows = rows.roll(-(updates % window), 0) if updates > window else rows[:updates]
    rows = rows.detach().cpu().double()
    return rows[rows.isfinite().flatten(1).all(1)]


def l2_readings(names: list[str], series: Tensor) -> list[Reading]:
    """Return one reading for each of the series `[series, n, 2]` of (tr Σ, |Ĝ|²)."""
    series = series[..., :2]
    parts = zip(names, series.mean(1).tolist(), ratio_intervals(series), strict=True)
    return [Reading(name, noise, signal, interval) for name, (noise, signal), interval in parts]


def l1_readings(names: list[str], series: Tensor) -> list[Reading]:
    """Return one reading for each of the series `[series, n, 5]`. The last three of the five
    columns are `l1_sums`.
    """
    s, size, excess = series[..., 2:].unbind(2)
    noise, signal = s.mean(1).square(), (size - excess / 2).mean(1).clamp(min=0).square()
    lows = ratio_intervals(torch.stack([s, size], 2))
    highs = ratio_intervals(torch.stack([s, size - excess], 2))
    parts = zip(names, noise.tolist(), signal.tolist(), lows, highs, strict=True)
    return [Reading(name, x, y, (low**2, high**2)) for name, x, y, (low, _), (_, high) in parts]
