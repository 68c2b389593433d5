"""Gradient statistics for people: how strong the signal is, how much the samples disagree, what batch size that suggests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from varreg.engine.ledger import Moments
from varreg.engine.shards import number
from varreg.tables import table


@dataclass(frozen=True)
class Row:
    """Statistics of one layer, or of the whole model.

    With g the true gradient and Σ the covariance of the per-sample gradients, unbiased estimates from m samples are
    tr Σ ≈ m/(m−1)·Σ v² and |g|² ≈ |ḡ|² − tr Σ/m.
    """

    name: str
    parameters: int
    count: int
    grad_norm: float
    """|ḡ|: the norm of the mean gradient."""
    trace: float
    """tr Σ: the total variance of the per-sample gradients."""

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio of the mean gradient: |ḡ| over its own standard error, √(tr Σ/m). Pure noise has 1."""
        noise = math.sqrt(self.trace / self.count) if self.trace >= 0 else math.nan
        return self.grad_norm / noise if noise else math.inf

    @property
    def rho(self) -> float:
        """ρ of the whole: Σ v²/|ḡ|²."""
        return self.trace * (self.count - 1) / self.count / self.grad_norm**2 if self.grad_norm else math.nan

    @property
    def noise_scale(self) -> float:
        """tr Σ/|g|²: the batch size at which noise and signal are equal. Infinite where the signal drowns in the noise."""
        signal = self.grad_norm**2 - self.trace / self.count
        if math.isnan(self.trace):
            return math.nan
        return self.trace / signal if signal > 0 else (math.inf if self.trace > 0 else 0.0)

    @property
    def advice(self) -> str:
        """What the noise scale says about the batch size, in words."""
        b = self.noise_scale
        if math.isnan(b):
            return "too few samples to tell"
        if math.isinf(b):
            return f"signal below the noise of {self.count} samples: a larger batch would help"
        if b < self.count / 2:
            return f"samples agree: a batch of about {max(1, round(b))} would do"
        if b > self.count * 2:
            return f"noisy: batches up to about {_round(b)} still pay"
        return f"a batch of {self.count} is about right"


def _round(x: float) -> int:
    digits = max(0, int(math.log10(x)) - 1)
    return int(round(x, -digits))


@dataclass(frozen=True)
class Summary:
    """Rows per layer, and one for the whole model; `print` it."""

    layers: list[Row]
    model: Row | None

    def as_dict(self) -> dict[str, float]:
        """Flat numbers for a logger: `rho/conv1`, `snr/conv1`, `noise_scale/conv1`, …, and `rho`, `snr`, `noise_scale` of the model."""
        rows = [(f"/{r.name}", r) for r in self.layers] + ([("", self.model)] if self.model else [])
        return {f"{what}{at}": getattr(r, what) for at, r in rows for what in ("rho", "snr", "noise_scale")}

    def __str__(self) -> str:
        if self.model is None:
            return "varreg: no moments yet; call backward() first."
        head = ("layer", "parameters", "|ḡ|", "SNR", "noise scale", "what it suggests")
        return table(head, [self._cells(r) for r in (*self.layers, self.model)], words=(0, 5))

    @staticmethod
    def _cells(r: Row) -> tuple[str, ...]:
        return (r.name, f"{r.parameters:,}", f"{r.grad_norm:.3g}", f"{r.snr:.2f}", f"{r.noise_scale:,.1f}", r.advice)


def _row(name: str, parts: list[Moments]) -> Row:
    count = min(m.count for m in parts)
    square = sum(number(m.mean.square().sum()) for m in parts)
    trace = sum(number(m.variance.sum()) * m.count / (m.count - 1) if m.count > 1 else math.nan for m in parts)
    return Row(name, sum(m.total.numel() for m in parts), count, math.sqrt(square), trace)


def summarize(named: list[tuple[str, Moments | None]]) -> Summary:
    """Parameters grouped by the module that owns them."""
    layers: dict[str, list[Moments]] = {}
    for name, m in named:
        if m is not None:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(m)
    rows = [_row(name, parts) for name, parts in layers.items()]
    return Summary(rows, _row("whole model", [m for parts in layers.values() for m in parts]) if rows else None)
