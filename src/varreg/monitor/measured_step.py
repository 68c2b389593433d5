"""Compute the numbers of one step, for the whole model and for its layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from varreg.engine.observer import Observer
from varreg.engine.parameters import moments
from varreg.noise import gauges
from varreg.noise.noise_scale import NoiseScale
from varreg.optim.base import Regularized
from varreg.thresholds import NUMBER_DIGITS

Numbers = dict[str, Any]
"""Values of one step by name: numbers, and lists of numbers."""


def of_noise(observer: Observer, noise: NoiseScale, layers: bool) -> Numbers:
    """Return the numbers that follow from the moments; call it after `noise.update()`. The size of
    the mean gradient, its noise and the gauges are those of this batch. B_n, its interval, and the
    layers whose gradient is mostly noise or mostly signal are averages from `noise`.
    """
    latest, m = noise.latest, noise.batch
    trace, signal = latest.sum(0).tolist()
    out: Numbers = {"batch": m, **sizes(trace, signal, m)}
    if observer.per == "element":
        parts = [moments(p) for p, _ in observer.parameters if p.requires_grad]
        out["gsnr"] = gauges.gsnr(parts)
        out["evidence"] = 1 - m * out["gsnr"]
    model = noise.model
    out["noise_scale"] = model.value
    out["noise_scale_low"], out["noise_scale_high"] = model.interval
    readings = noise.layers
    out["noise_layers"] = [i for i, r in enumerate(readings) if r.interval[0] > m]
    out["signal_layers"] = [i for i, r in enumerate(readings) if r.interval[1] < m]
    if layers:
        rows = latest.tolist()
        out["layer_snr"] = [sizes(trace, signal, m)["snr"] for trace, signal in rows]
        out["layer_noise_scale"] = [r.value for r in readings]
    return out


def sizes(trace: float, signal: float, m: int) -> Numbers:
    """Return |ḡ|, the standard error of ḡ, and the ratio of the two in both directions.

    >>> sizes(trace=8.0, signal=3.0, m=8)  # |ḡ|² = 3 + 8/8
    {'grad_norm': 2.0, 'grad_error': 1.0, 'snr': 2.0, 'norm_test': 0.5}
    """
    norm = math.sqrt(max(signal + trace / m, 0.0)) if math.isfinite(trace + signal) else math.nan
    error = math.sqrt(max(trace, 0.0) / m) if math.isfinite(trace) else math.nan
    return {
        "grad_norm": norm,
        "grad_error": error,
        "snr": norm / error if error else math.inf,
        "norm_test": error / norm if norm else math.inf,
    }


def of_step(optimizer: Optimizer | None) -> Numbers:
    """Return the learning rate of the first param group; for a regularized step also λ."""
    out: Numbers = {}
    if optimizer is not None and optimizer.param_groups[0].get("lr") is not None:
        out["lr"] = float(optimizer.param_groups[0]["lr"])
    if isinstance(optimizer, Regularized):
        row = optimizer.lambda_summary(parameters=False).model
        if row is not None:
            names = ("effective", "mean", "q10", "q50", "q90")
            found = (row.effective, row.mean, *row.quantiles)
            out |= {f"lambda_{name}": x for name, x in zip(names, found, strict=True)}
    return out


def of_loss(loss: float | None, lr: float | None, error: float | None, m: int) -> Numbers:
    """Return the loss; if it is positive, also the batch of CABS, lr·tr Σ/loss."""
    if loss is None:
        return {}
    known = lr is not None and error is not None and loss > 0
    return {"loss": loss, **({"cabs": lr * error**2 * m / loss} if known else {})}  # type: ignore


def rounded(values: Numbers) -> Numbers:
    """Return numbers rounded to their significant digits.

    >>> rounded({"step": 3, "loss": 1 / 3, "layer_snr": [2 / 3]})
    {'step': 3, 'loss': 0.3333333, 'layer_snr': [0.6666667]}
    """
    return {name: value if name == "time" else _round(value) for name, value in values.items()}


def _round(value: Any) -> Any:
    if isinstance(value, list):
        return [_round(x) for x in value]
    return float(f"{value:.{NUMBER_DIGITS}g}") if isinstance(value, float) else value


def scalars(values: Numbers, layers: Iterable[str] = (), prefix: str = "") -> dict[str, float]:
    """Return finite numbers by name, for a logger. The name of a layer's number contains the
    layer's name. A list of layers becomes their number.

    >>> scalars({"loss": 0.5, "cabs": float("inf"), "layer_snr": [2.0]}, ["conv1"], "varreg/")
    {'varreg/loss': 0.5, 'varreg/layers/conv1/snr': 2.0}
    """
    out: dict[str, float] = {}
    for name, value in values.items():
        if name in ("step", "time"):
            continue
        if name.startswith("layer_"):
            what = name.removeprefix("layer_")
            out |= {f"layers/{at}/{what}": x for at, x in zip(layers, value, strict=False)}
        else:
            out[name] = len(value) if isinstance(value, list) else value
    return {prefix + name: float(x) for name, x in out.items() if math.isfinite(x)}
