"""Gradient statistics of one batch, for people: how strong the signal is, and how much the samples
disagree. To choose a batch size, many batches are needed: use `varreg.NoiseScale`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from varreg.engine.mean_variance import Moments
from varreg.engine.totals import Totals
from varreg.shards import number
from varreg.tables import table


@dataclass(frozen=True)
class NoiseRow:
    """Statistics of one layer, or of the whole model.

    With g the true gradient and Σ the covariance of the per-sample gradients, unbiased estimates
    from m samples are tr Σ ≈ m/(m−1)·Σ v² and |g|² ≈ |ḡ|² − tr Σ/m.
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
        """Return the signal-to-noise ratio of the mean gradient: |ḡ| over its own standard error,
        √(tr Σ/m). Pure noise has 1; a gradient of zeros has nan.
        """
        noise = math.sqrt(self.trace / self.count) if self.trace >= 0 else math.nan
        if not noise:
            return math.inf if self.grad_norm else math.nan
        return self.grad_norm / noise

    @property
    def rho(self) -> float:
        """Return ρ of the whole: Σ v²/|ḡ|²."""
        return (
            self.trace * (self.count - 1) / self.count / self.grad_norm**2
            if self.grad_norm
            else math.nan
        )

    @property
    def signal(self) -> float:
        """Return |Ĝ|² = |ḡ|² − tr Σ/m, unbiased for the square of the true gradient: it may be
        negative.
        """
        return self.grad_norm**2 - self.trace / self.count

    @property
    def noise_scale(self) -> float:
        """Return tr Σ/|Ĝ|²: the batch size at which noise and signal are equal, estimated from one
        batch. Infinite if the estimate of the signal is not positive.
        """
        if math.isnan(self.signal):
            return math.nan
        if self.signal > 0:
            return self.trace / self.signal
        return math.inf if self.trace > 0 else 0.0

    @property
    def text(self) -> str:
        """Return in words what one batch shows about signal and noise."""
        b = self.noise_scale
        if not math.isfinite(self.grad_norm):
            return "a gradient that is not finite"
        if self.grad_norm == self.trace == 0:
            return "no gradient"
        if math.isnan(b):
            return "too few samples to tell"
        if math.isinf(b):
            return f"no signal above the noise of {self.count} samples"
        if b > self.count:
            return f"less signal than noise in {self.count} samples"
        return f"more signal than noise in {self.count} samples"


@dataclass(frozen=True)
class Summary:
    """Rows per layer, and one for the whole model; `print` it."""

    layers: list[NoiseRow]
    model: NoiseRow | None

    def as_dict(self) -> dict[str, float]:
        """Return flat numbers for a logger: `rho/conv1`, `snr/conv1`, `noise_scale/conv1`, …, and
        `rho`, `snr`, `noise_scale` of the model. `trace` and `signal` can be averaged over batches:
        the ratio of their averages is a noise scale, but an average of `noise_scale` is not.
        """
        rows = [(f"/{r.name}", r) for r in self.layers] + ([("", self.model)] if self.model else [])
        return {
            f"{what}{at}": getattr(r, what)
            for at, r in rows
            for what in ("rho", "snr", "noise_scale", "trace", "signal")
        }

    def __str__(self) -> str:
        if self.model is None:
            return "varreg: no moments yet; call backward() first."
        head = ("layer", "parameters", "|ḡ|", "SNR", "what one batch says")
        cells = [self._cells(r) for r in (*self.layers, self.model)]
        return f"{table(head, cells, words=(0, 4))}\nFor a batch size: varreg.NoiseScale."

    @staticmethod
    def _cells(r: NoiseRow) -> tuple[str, ...]:
        return (
            r.name,
            f"{r.parameters:,}",
            f"{r.grad_norm:.3g}",
            f"{r.snr:.2f}",
            r.text,
        )


def layer_of(name: str) -> str:
    """Return the name of the module that owns a parameter; its own name if the model owns it."""
    return name.rpartition(".")[0] or name


def row(name: str, parts: Sequence[Moments | Totals]) -> NoiseRow:
    """Return the statistics of some parameters together."""
    count = min(m.count for m in parts)
    square = sum(number(m.total_mean_square) for m in parts)
    trace = sum(
        number(m.total_variance) * m.count / (m.count - 1) if m.count > 1 else math.nan
        for m in parts
    )
    return NoiseRow(name, sum(m.elements for m in parts), count, math.sqrt(square), trace)


def summarize(named: list[tuple[str, Moments | Totals | None]], by_layer: bool = True) -> Summary:
    """Return the statistics of each module's own parameters, and of the whole model; without
    `by_layer`, of the whole model alone.
    """
    if not by_layer:
        known = [m for _, m in named if m is not None]
        return Summary([], row("whole model", known) if known else None)
    layers: dict[str, list[Moments | Totals]] = {}
    for name, m in named:
        if m is not None:
            layers.setdefault(layer_of(name), []).append(m)
    rows = [row(name, parts) for name, parts in layers.items()]
    return Summary(
        rows, row("whole model", [m for parts in layers.values() for m in parts]) if rows else None
    )
