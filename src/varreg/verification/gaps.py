"""The gaps between varreg's numbers and their definition, which is a sum over single samples in
float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from varreg.devices import in_double
from varreg.verification.observed_steps import Measurement
from varreg.verification.result import Row
from varreg.verification.tolerance import Setting


class Sums:
    """Sums over samples of one parameter's gradients and their squares."""

    def __init__(self, p: Tensor):
        self.first = in_double(torch.zeros_like(p))
        self.second = torch.zeros_like(self.first)
        self.count, self.used = 0, False

    def add(self, grad: Tensor | None) -> None:
        """Add the gradient of one sample; None is zero."""
        self.count += 1
        if grad is not None:
            wide = in_double(grad)
            self.first += wide
            self.second += wide.square()
            self.used = True


def compare_moments(
    sums: dict[str, Sums],
    grads: dict[str, Tensor | None],
    measurement: Measurement,
    setting: Setting,
) -> tuple[Row, ...]:
    """Compare every parameter's numbers, element by element, relative to the size of the g_i.

    `grads` are the gradients of the batch, without varreg.
    """
    rows, sizes = [], _sizes(sums, setting.floor)
    for name, s in sums.items():
        n, mean, second, size = s.count, s.first / s.count, s.second / s.count, sizes[name]
        truth = mean, second, (second - mean.square()).clamp(min=0)
        factor = setting.sum_factor(n)
        plain = widen(grads[name], mean)
        measured = [step[name] for step in measurement.steps]
        gaps = [_largest((plain / factor - mean) / size)]
        gaps.append(max(_largest((widen(m.grad, mean) - plain) / factor / size) for m in measured))
        # Mean, second moment and variance. The last two have the size of a square.
        for i, power in enumerate((1, 2, 2)):
            gaps.append(max(_moment_gap(m.moments, i, truth[i], size**power, n) for m in measured))
        rows.append(Row(name, tuple(mean.shape), s.used, *gaps))
    return tuple(rows)


def noise_of(sums: dict[str, Sums], truth: dict[str, Sums], floor: float) -> dict[str, float]:
    """Return the gap between the sums of each parameter and the true sums."""
    gaps, sizes = {}, _sizes(sums, floor)
    for name, s in sums.items():
        first = (s.first - truth[name].first) / s.count / sizes[name]
        second = (s.second - truth[name].second) / s.count / sizes[name].square()
        gaps[name] = max(_largest(first), _largest(second))
    return gaps


def widen(t: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient in float64; zeros of the shape of another tensor if the gradient is
    None.
    """
    return torch.zeros_like(like) if t is None else in_double(t)


def _sizes(sums: dict[str, Sums], floor: float) -> dict[str, Tensor]:
    """Return the size of the g_i of each element, √((1/m) Σ g_i²). Unlike the mean, it does not
    become small if the g_i cancel.

    It is at least `floor` times the largest size of all parameters.
    """
    sizes = {name: (s.second / s.count).sqrt() for name, s in sums.items()}
    least = floor * max(map(_largest, sizes.values()))
    return {name: size.clamp(min=least or 1.0) for name, size in sizes.items()}


def _moment_gap(
    measured: tuple[int, Tensor, Tensor, Tensor] | None,
    which: int,
    truth: Tensor,
    size: Tensor,
    n: int,
) -> float:
    """Return the gap of one moment. Without moments it is 0 if the truth is 0, else infinite."""
    if measured is None:
        return math.inf if bool(truth.any()) else 0.0
    return _largest((measured[1 + which] - truth) / size) if measured[0] == n else math.inf


def _largest(t: Tensor) -> float:
    return float(t.abs().nan_to_num(math.inf).max()) if t.numel() else 0.0
