"""Trials of outputs without a batch: are they sums over samples?

L is such a sum if L(a, b) − L(a′, b) − L(a, b′) + L(a′, b′) = 0 for every split of the samples
into two sides a and b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from varreg.devices import widest
from varreg.engine.trace.layout import Layout, Place
from varreg.engine.trace.trial.trial_values import (
    FAILURES,
    Run,
    exchange,
    other_samples,
    random_like,
    shuffle_all,
    splits,
)
from varreg.thresholds import MOST_COPIES, SUM


def is_sum(
    run: Run,
    inputs: list[Tensor],
    at: Sequence[Place],
    random: bool = True,
) -> bool:
    """Return whether outputs without a batch are sums over samples."""
    # If two samples only exchange their values, the trial does not notice L(a, b) = −L(b, a).
    draws: list[Callable[[], tuple[list[Tensor], list[Tensor]]]] = [
        lambda: (inputs, other_samples(inputs, at))
    ]
    if random:
        draws += [
            lambda: (inputs, _random(inputs, positive=False)),
            lambda: (_random(inputs, positive=False), _random(inputs, positive=False)),
            lambda: (_random(inputs, positive=True), _random(inputs, positive=True)),
        ]
    moved = False
    for draw in draws:
        try:
            moved |= _try_sum(run, *draw(), at)
        except _NotASumError:  # noqa: PERF203
            return False
        except FAILURES:
            continue
    return moved


def _random(inputs: list[Tensor], positive: bool) -> list[Tensor]:
    return [random_like(t, positive) for t in inputs]


def is_mean_of_copies(run: Run, inputs: list[Tensor], at: Sequence[Place]) -> bool:
    """Return whether sums over samples are the mean of the sums over as many copies of each sample.

    This finds a branch of the code that the whole batch takes, but some samples alone would not.
    """
    batch = at[0].batch
    if batch > MOST_COPIES or not all(isinstance(place, Layout) for place in at):
        return True
    totals, size = [widest(t) for t in run(inputs)], 0.0
    means = [torch.zeros_like(t) for t in totals]
    for number in range(batch):
        copies = shuffle_all(inputs, at, torch.full((batch,), number, device="cpu"))
        for mean, one in zip(means, run(copies), strict=True):
            if one.shape != mean.shape:
                return False
            mean += widest(one) / batch
            size = max(size, _largest(widest(one)))
    eps = max(torch.finfo(t.dtype).eps for t in run(inputs))
    pairs = zip(totals, means, strict=True)
    return all(_largest(total - mean) <= SUM * eps * size for total, mean in pairs)


class _NotASumError(Exception):
    """The outputs are not sums over samples."""


def _try_sum(run: Run, inputs: list[Tensor], others: list[Tensor], at: Sequence[Place]) -> bool:
    """Return whether the outputs changed at all; raise a `_NotASumError` if they are not sums."""
    moved = False
    every = torch.ones(at[0].batch, dtype=torch.bool, device="cpu")
    first, last = run(inputs), run(exchange(inputs, others, at, every))
    for chosen in splits(at[0].batch):
        a, b = (run(exchange(inputs, others, at, side)) for side in (chosen, ~chosen))
        for i in range(len(first)):
            if not (first[i].shape == a[i].shape == b[i].shape == last[i].shape):
                raise _NotASumError
            ends = [widest(t[i]) for t in (first, last, a, b)]
            scale = max(map(_largest, ends))
            gap = _largest(ends[0] + ends[1] - ends[2] - ends[3])
            if gap > SUM * torch.finfo(first[i].dtype).eps * scale:
                raise _NotASumError
            moved |= not torch.equal(ends[0], ends[2])
    return moved


def _largest(t: Tensor) -> float:
    """Return the largest absolute value among finite values."""
    return float(t.abs().nan_to_num(0.0, 0.0, 0.0).max())
