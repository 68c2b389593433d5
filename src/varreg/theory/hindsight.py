"""Compare causal regularizers with the best regularizer in hindsight: which share of its gain does
each of them catch?

A series of variances σ_t² is given. The hindsight optimum knows the whole series (`optimum.py`); a
form with a history knows only the past. Both are judged by Q = Σ λ_t(1 + λ_t/λ₀)σ_t² at a mean λ of
1 and λ_t ≤ λ₀. A causal λ is scaled to this mean by a factor that is chosen in hindsight, like a
tuned learning rate: a shorter or a longer step alone is no gain. The share that is caught is

    (Q(1) − Q(λ)) / (Q(1) − Q(optimum)),

1 for the optimum, 0 for a constant, negative for a λ that makes Q larger. All functions take one
series, [T], or several, [T, k].
"""

from __future__ import annotations

import csv
import gzip
import importlib.resources
import io
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varreg import regularizer
from varreg.errors import VarregError
from varreg.theory.optimum import objective, optimal
from varreg.theory.problems import changing, drifting


def causal(sigma2: Tensor, delta2: Tensor | None = None, **options: object) -> Tensor:
    """Return λ_t of VR-SGD's regularizer with these options, from σ_1² … σ_t². A scale-free one
    also needs `delta2`, δ̄_t².
    """
    chosen = {**regularizer.DEFAULTS, "scale_free": delta2 is not None, **options}
    regularizer.check(chosen)
    if chosen["scale_free"] and delta2 is None:
        raise VarregError(
            "varreg: a scale-free λ needs δ̄², the squares of the increments, beside their "
            "variances."
        )
    sigma2 = sigma2.double()
    delta = torch.ones_like(sigma2) if delta2 is None else delta2.double().sqrt()
    shape = sigma2.shape[1:] or (1,)
    history, count = torch.zeros(2, *shape, dtype=torch.float64)
    rows = zip(
        sigma2.reshape(-1, *shape).contiguous(), delta.reshape(-1, *shape).contiguous(), strict=True
    )
    return torch.stack(
        [regularizer.lambdas(v, d, history, count, 2, chosen).clone() for v, d in rows]
    ).reshape(sigma2.shape)


class Caught(NamedTuple):
    """The share of the hindsight optimum's gain that a regularizer catches, and its mean λ."""

    share: float
    mean_lambda: float


def gain(sigma2: Tensor, lambda0: float) -> float:
    """Return 1 − Q(optimum)/Q(1): the share of the accumulated error that the best regularizer
    would save at the same mean step.
    """
    best = optimal(sigma2.double(), lambda0, high=max(1.0, lambda0))
    return 1 - float(
        objective(best, sigma2.double(), lambda0)
        / objective(torch.ones_like(best), sigma2.double(), lambda0)
    )


def at_mean_one(lam: Tensor, high: float) -> Tensor:
    """Return min(cλ, high), with c chosen for a mean of 1. If too many λ are 0 for that, those that
    are 0 share the missing part evenly.

    >>> at_mean_one(torch.tensor([1.0, 1.0, 6.0]), high=2.0)
    tensor([0.5000, 0.5000, 2.0000])
    >>> at_mean_one(torch.tensor([0.0, 0.0, 6.0]), high=2.0)
    tensor([0.5000, 0.5000, 2.0000])
    """
    full = torch.where(lam > 0, high, 0.0).to(lam)
    if float(full.mean()) <= 1:
        return torch.where(lam > 0, full, (len(lam) - full.sum()) / (lam <= 0).sum().clamp(min=1))
    low, up = 0.0, 1 / float(lam.mean())
    while float((up * lam).clamp(max=high).mean()) < 1:
        low, up = up, 2 * up
    for _ in range(60):
        c = (low + up) / 2
        low, up = (c, up) if float((c * lam).clamp(max=high).mean()) < 1 else (low, c)
    return (up * lam).clamp(max=high)


def caught(lam: Tensor, sigma2: Tensor, lambda0: float) -> Caught:
    """Return the share that a series of λ catches; nan if all variances are equal, so that there is
    nothing to gain.
    """
    sigma2, mean = sigma2.double(), float(lam.mean())
    if not mean > 0:
        return Caught(-math.inf, mean)
    plain = float(objective(torch.ones_like(sigma2), sigma2, lambda0))
    best = plain * gain(sigma2, lambda0)
    saved = plain - float(objective(at_mean_one(lam.double(), max(1.0, lambda0)), sigma2, lambda0))
    return Caught(saved / best if best > 1e-12 * plain else math.nan, mean)


class Series(NamedTuple):
    """Variances over time, with the squares of the increments if these are known: [T, k], k series
    of one kind.
    """

    name: str
    sigma2: Tensor
    delta2: Tensor | None = None

    @property
    def spread(self) -> float:
        """Return the standard deviation of log σ over time; the median over series."""
        return float((self.sigma2.log() / 2).std(0).median())

    def without_trend(self, window: int = 51) -> Series:
        """Return both series divided by their geometric means over neighbouring steps. Only changes
        from batch to batch remain.
        """

        def flat(x: Tensor) -> Tensor:
            return x / _smooth(x.log(), window).exp()

        return Series(
            self.name, flat(self.sigma2), None if self.delta2 is None else flat(self.delta2)
        )


def _smooth(x: Tensor, window: int) -> Tensor:
    """Return the mean over neighbours along the first dimension, fewer of them at the ends."""
    half, total = window // 2, torch.cat([torch.zeros_like(x[:1]), x.cumsum(0)])
    t = torch.arange(len(x))
    low, high = (t - half).clamp(min=0), (t + half + 1).clamp(max=len(x))
    return (total[high] - total[low]) / (high - low)[:, None]


RECORDED = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}


def _read(name: str) -> dict[str, Tensor]:
    """Return the columns of a file that `varreg.lab.variances` wrote."""
    text = gzip.decompress(
        (importlib.resources.files("varreg.theory") / "series" / f"{name}.csv.gz").read_bytes()
    ).decode()
    head, *rows = csv.reader(io.StringIO(text))
    return dict(
        zip(
            head,
            torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64).T,
            strict=True,
        )
    )


def recorded(name: str) -> list[Series]:
    """Return series recorded in real training: of the model, of its weight tensors, and of single
    elements.

    Elements without a gradient at some step are left out: their σ² is 0 there, and the optimum
    would put all of λ into that step.
    """
    columns = _read(name)
    names = [column.removeprefix("v2 ") for column in columns if column.startswith("v2 ")]
    kinds = {
        "whole model": [n for n in names if n == "model"],
        "weight tensors": [n for n in names if n != "model" and "[" not in n],
        "single elements": [n for n in names if "[" in n],
    }
    kinds = {
        kind: [n for n in these if (columns[f"v2 {n}"] > 0).all()] for kind, these in kinds.items()
    }
    return [
        Series(
            f"{RECORDED[name]}, {kind}",
            *(torch.stack([columns[f"{what} {n}"] for n in these], 1) for what in ("v2", "g2")),
        )
        for kind, these in kinds.items()
        if these
    ]


def all_series() -> list[Series]:
    """Return synthetic series, whose variances change from step to step, change slowly, or fall
    steadily; and the series of real training.
    """
    T = 1000
    made = [
        Series(f"changing, spread {spread:g}", changing(T, spread)[:, None])
        for spread in (0.1, 0.5, 1.0)
    ]
    made.append(Series("drifting, spread 0.5", drifting(T, 0.5)[:, None]))
    made.append(Series("falling to 1/100", torch.logspace(0, -2, T, dtype=torch.float64)[:, None]))
    for name in RECORDED:
        real = recorded(name)
        made += [s._replace(name=f"{s.name}: drift and all") for s in real]
        made += [s.without_trend()._replace(name=f"{s.name}: batch to batch") for s in real]
    return made


ARMS: dict[str, dict[str, object]] = {
    **{
        f"{form}, {h}": {"form": form, "history": h}
        for form in regularizer.FORMS
        for h in regularizer.HISTORIES
    },
    "rational, harmonic, s = 20": {"history": "harmonic", "s": 20.0},
    **{
        f"rational of ρ, {h}": {"history": h, "scale_free": True}
        for h in ("mean", "geometric", "harmonic")
    },
}
"""The judged regularizers, by name."""


def medians_caught(
    series: Sequence[Series], lambda0: float, **options: object
) -> dict[str, Caught]:
    """Return, for each series by its name, the median share over its columns; nan if the
    regularizer needs δ̄² and the series has none.

    Series of one length go through time together: elements do not depend on each other.
    """
    needs_delta = bool(options.get("scale_free"))
    found = {one.name: Caught(math.nan, math.nan) for one in series}
    able = [one for one in series if not needs_delta or one.delta2 is not None]
    for length in {len(one.sigma2) for one in able}:
        together = [one for one in able if len(one.sigma2) == length]
        sigma2 = torch.cat([one.sigma2 for one in together], 1)
        delta2 = torch.cat([_squares(one) for one in together], 1) if needs_delta else None
        lam = causal(sigma2, delta2, **options).split([one.sigma2.shape[1] for one in together], 1)
        for one, its_lam in zip(together, lam, strict=True):
            each = [caught(a, b, lambda0) for a, b in zip(its_lam.T, one.sigma2.T, strict=True)]
            found[one.name] = Caught(
                statistics.median(c.share for c in each),
                statistics.median(c.mean_lambda for c in each),
            )
    return found


def _squares(series: Series) -> Tensor:
    assert series.delta2 is not None
    return series.delta2


class Relation(NamedTuple):
    """The relation between v² of a batch and the error ε of that batch's mean gradient, over many
    batches at one point of training.
    """

    spread: float
    """The standard deviation of log v."""
    slope: float
    """The slope of log ε² over log v²: 1 if v² predicts the size of the error, 0 if it does not."""
    slope_error: float


def relation_at_end(name: str) -> tuple[Relation, dict[str, Tensor]]:
    """Return the relation at the end of a recorded run, at fixed parameters; and the columns of its
    file: v², ḡ², ε² and progress.
    """
    columns = _read(f"{name}-still")
    x, y = (columns[c].log() for c in ("v2", "e2"))
    dx, dy = x - x.mean(), y - y.mean()
    slope = float((dx * dy).sum() / dx.square().sum())
    residual = float((dy - slope * dx).square().sum() / (len(x) - 2))
    error = math.sqrt(residual / float(dx.square().sum()))
    return Relation(float(x.std() / 2), slope, error), columns


class Saved(NamedTuple):
    """The share of Q that a λ saves at one point of training, with standard errors. It is negative
    if λ makes Q larger.
    """

    apparent: float
    """The share at a mean λ of 1, computed with v²."""
    real: float
    """The same, computed with the true errors ε²."""
    real_error: float
    at_equal_progress: float
    """The share computed with the true errors, with λ scaled so that E[λ ḡ·g] is the same as
    without λ: steps go equally far along the gradient.
    """
    at_equal_progress_error: float


def saved(columns: dict[str, Tensor], lambda0: float, **options: object) -> Saved:
    """Return the shares that a causal λ saves over batches at one point; standard errors come from
    200 bootstrap samples.
    """
    lam = causal(columns["v2"], columns["g2"] if options.get("scale_free") else None, **options)
    v2, e2, p = columns["v2"], columns["e2"], columns["progress"]

    def share(scaled: Tensor, of: Tensor) -> Tensor:
        """Return the share of Q that is saved relative to λ = 1, for each row of batches."""
        return 1 - (scaled * (1 + scaled / lambda0) / (1 + 1 / lambda0) * of).mean(-1) / of.mean(-1)

    index = torch.randint(len(lam), (200, len(lam)), generator=torch.Generator().manual_seed(0))
    each = []
    for i in (torch.arange(len(lam))[None], index):
        drawn, errors, progress = lam[i], e2[i], p[i]
        even = drawn / drawn.mean(-1, keepdim=True)
        far = drawn * (progress.mean(-1, keepdim=True) / (drawn * progress).mean(-1, keepdim=True))
        each.append((share(even, errors), share(far, errors)))
    (real, equal), spread = each
    apparent = share(lam / lam.mean(), v2)
    return Saved(
        float(apparent), float(real), float(spread[0].std()), float(equal), float(spread[1].std())
    )
