"""Gauges: numbers from the moments of one batch. Each docstring says what the gauge is good for.

A gauge takes the moments that `varreg.moments(p)` returns: those of one parameter, of a layer, or
of all parameters. It ignores None. With m samples, s² = m/(m−1)·v² is the unbiased variance of one
sample's gradient, tr Σ its sum over all elements, and |Ĝ|² = |ḡ|² − tr Σ/m.

Several micro-batches and several processes have the gauges of the whole batch. If parameters are
sharded, all ranks must call a gauge, since it adds up over them.

>>> import torch, varreg
>>> layer = torch.nn.Linear(1, 1, bias=False)
>>> observer = varreg.observe(layer)
>>> layer(torch.tensor([[1.0], [3.0]])).mean().backward()  # gradients 1 and 3
>>> moments = [varreg.moments(p) for p in layer.parameters()]
>>> norm_test(moments), round(noise_scale(moments), 3)  # tr Σ = 2, |ḡ| = 2
(0.5, 0.667)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from varreg.engine.mean_variance import Moments
from varreg.engine.noise_summary import NoiseRow, row
from varreg.engine.totals import Totals
from varreg.errors import VarregError
from varreg.noise.measure import l1_sums
from varreg.shards import number

if TYPE_CHECKING:
    from varreg.optim.base import Regularized

Several = Iterable[Moments | Totals | None] | Moments | Totals | None


def norm_test(moments: Several) -> float:
    """Return θ = √(tr Σ/m)/|ḡ|: the standard error of the mean gradient over its size.

    Good for: finding batches that are mostly noise, where θ is near 1. Not for: growing the batch
    while θ is large; a constant batch with a tuned decay did better. The test is by Byrd et al.
    2012.
    """
    snr = _row(moments).snr
    return 1 / snr if snr else math.inf


def gsnr(moments: Several) -> float:
    """Return the mean over elements of ḡ²/s², the gradient signal-to-noise ratio (Liu et al. 2020).

    Good for: finding the layers that learn. Not for: scaling steps; no gain over a tuned learning
    rate was found. The ratio includes the noise of ḡ itself, about 1/m. It ignores elements without
    variance.
    """
    total, elements = _ratios(_known(moments))
    return total / elements if elements else math.nan


def cabs(moments: Several, lr: float, loss: float) -> float:
    """Return lr·tr Σ/loss, the batch size of CABS (Balles et al. 2017). The loss must be a mean
    over samples.

    Good for: a batch size that fits a learning rate of plain SGD, if the minimum of the loss is 0.
    Not for: momentum, Adam, or a loss with another minimum.
    """
    for name, value in (("lr", lr), ("loss", loss)):
        if not isinstance(value, (int, float, Tensor)) or not value > 0:
            raise VarregError(f"varreg: cabs expects a positive {name}; got {value!r}.")
    return lr * _row(moments).trace / loss


def evidence(moments: Several) -> float:
    """Return 1 − m·mean(ḡ²/s²), the evidence criterion (Mahsereci et al. 2017). If it is above 0,
    the mean gradient cannot be told from noise.

    Good for: deciding when to stop with a few hundred samples in one batch, and no validation set.
    Not for: more data, where it stopped too early or never.
    """
    parts = _known(moments)
    total, elements = _ratios(parts)
    return 1 - parts[0].count * total / elements if elements else math.nan


def noise_scale(moments: Several) -> float:
    """Return tr Σ/|Ĝ|², infinite where |Ĝ|² is not positive.

    Good for: nothing, from one batch alone. Use `varreg.NoiseScale`, which averages numerator and
    denominator.
    """
    return _row(moments).noise_scale


def noise_scale_l1(moments: Several) -> float:
    """Return (Σ_p s_p)²/(Σ_p |G_p|)², for optimizers that step by signs.

    Good for: nothing, from one batch alone. Use `varreg.NoiseScale(observer, l1=True)`, which has
    the same estimate of |G_p|.
    """
    sums = [l1_sums(m) for m in _known(moments)]
    s, size, excess = (sum(number(part[i]) for part in sums) for i in range(3))
    signal = size - excess / 2
    if math.isnan(signal):
        return math.nan
    return (s / signal) ** 2 if signal > 0 else (math.inf if s > 0 else 0.0)


def effective_lambda(optimizer: Regularized) -> float:
    """Return the mean of λ in the last step, weighted by squared gradients; nan if the step had no
    λ.

    Good for: measuring by which factor λ made the whole step longer. SGD with a learning rate
    larger by this factor is the control for any gain. Not for: comparing layers of different
    curvature. If parameters are sharded, it is that of this rank's shards.
    """
    if not hasattr(optimizer, "lambda_summary"):
        raise VarregError(
            "varreg: effective_lambda expects one of varreg's optimizers; got "
            f"{type(optimizer).__name__}, which has no λ."
        )
    summary = optimizer.lambda_summary().model
    return summary.effective if summary is not None else math.nan


def _known(moments: Several) -> list[Any]:
    """Return all moments but None. Raise a VarregError unless each has two samples or more."""
    one = moments is None or isinstance(moments, (Moments, Totals))
    several: Any = [moments] if one or not isinstance(moments, Iterable) else moments
    parts = [m for m in several if m is not None]
    if not all(isinstance(m, (Moments, Totals)) for m in parts):
        raise VarregError(
            "varreg: a gauge expects what varreg.moments(p) returns, of one parameter or a list of "
            f"several; got {moments!r:.100}."
        )
    if not parts or any(min(m.count, m.groups) < 2 for m in parts):
        raise VarregError(
            "varreg: a gauge expects moments of two samples or more, as varreg.moments(p) returns "
            f"them after backward(); got {parts or 'none'}."
        )
    return parts


def _row(moments: Several) -> NoiseRow:
    return row("", _known(moments))


def _ratios(parts: list[Moments]) -> tuple[float, int]:
    """Return Σ ḡ²/s² over all elements that have a variance, and their number."""
    total, elements = 0.0, 0
    for m in parts:
        variance = m.variance
        has = variance != 0  # nan counts: a gradient that is not finite must show
        each = (m.mean.square() / variance).where(has, 0.0) * ((m.count - 1) / m.count)
        total, elements = total + number(each.sum()), elements + int(number(has.sum()))
    return total, elements
