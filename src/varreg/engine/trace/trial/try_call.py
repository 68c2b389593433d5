"""Trials of one call of a torch function: does it keep samples apart, is it a sum, is it affine?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from varreg.devices import has_float64, widest
from varreg.engine.trace.call import Call
from varreg.engine.trace.layout import Layout, Place, Single
from varreg.engine.trace.trial.runners import add_gradients, fixed_tensors, make_runner
from varreg.engine.trace.trial.sums import is_sum
from varreg.engine.trace.trial.trial_values import (
    FAILURES,
    Run,
    Verdict,
    other_order,
    other_random_numbers,
    random_like,
)
from varreg.engine.trace.trial.try_separation import follows_order, keeps_apart
from varreg.thresholds import AFFINE, AFFINE_SIZES, LARGE_VALUES, ROUNDING_OF_RANDOM


def try_call(call: Call, there: Place, which: int) -> Verdict:
    """Return whether each sample of a call affects only its own place in the output."""
    places = [place for _, place in call.carriers]
    fixed = fixed_tensors(call)
    below = min([n for t in fixed for n in t.shape], default=0)
    for dtype in _precisions(call):
        forward, inputs = make_runner(call, which, dtype)
        try:
            out = forward(inputs)[0]
        except FAILURES:
            continue
        if out.layout is not torch.strided:  # its rows cannot be read
            return Verdict.UNDECIDED
        both = add_gradients(forward, inputs, out)
        if both is None:
            return keeps_apart(forward, inputs, places, [there], below=below)
        cotangent = torch.randn_like(out)
        verdict = keeps_apart(forward, inputs, places, [there], below=below)
        if verdict is Verdict.APART:
            verdict = _try_gradients(both, inputs, places, there, cotangent)
        if verdict is not Verdict.APART:
            return verdict
        if dtype is not None and not _is_apart_as_given(call, there, which):
            return Verdict.MIXED
        if not _follows_order(forward, inputs, places, there, fixed):
            return Verdict.MIXED
        return Verdict.APART
    return Verdict.UNDECIDED


def _precisions(call: Call) -> tuple[torch.dtype | None, ...]:
    """Return the precisions in which to try a call: float64, in which rounding hides little, if all
    of its devices support it; then None, for its own precision.
    """
    wide = all(has_float64(t.device) for t in call.tensors())
    return (torch.float64, None) if wide else (None,)


def _try_gradients(
    both: Run, inputs: list[Tensor], places: Sequence[Place], there: Place, cotangent: Tensor
) -> Verdict:
    """Return whether the gradient of each sample's output reaches only that sample."""
    grad_places = [at for t, at in zip(inputs, places, strict=True) if t.is_floating_point()]
    # A backward may clip large values; and equal samples would show little.
    random = [random_like(t, positive=False) for t in inputs]
    for values, size in ((inputs, 1.0), (inputs, LARGE_VALUES), (random, 1.0)):
        verdict = keeps_apart(
            both,
            [*values, cotangent * size],
            [*places, there],
            [there, *grad_places],
            needs_proof=False,
        )
        if verdict is Verdict.UNDECIDED and values is random:
            continue  # the function does not accept random values
        if verdict is not Verdict.APART:
            return verdict
    return Verdict.APART


def _is_apart_as_given(call: Call, there: Place, which: int) -> bool:
    """Return whether a call keeps samples apart in its own precision, where it may behave
    differently.
    """
    if all(x.dtype is torch.float64 or not x.is_floating_point() for x, _ in call.carriers):
        return True
    forward, inputs = make_runner(call, which, None)
    places = [place for _, place in call.carriers]
    try:
        verdict = keeps_apart(forward, inputs, places, [there], needs_proof=False)
    except FAILURES:
        return True
    return verdict is not Verdict.MIXED


def _follows_order(
    forward: Run,
    inputs: list[Tensor],
    places: Sequence[Place],
    there: Place,
    fixed: Sequence[Tensor],
) -> bool:
    """Return whether reordered samples give the same results in the new order. This is tried with
    the given values, and with random ones, since the order of equal samples cannot be seen.

    If constants have a row for each sample, the order of samples matters, and nothing is tried.
    """
    if not isinstance(there, Layout):
        return True
    if any(n in (there.size, there.batch) for t in fixed for n in t.shape):
        return True

    def run_otherwise(values: list[Tensor]) -> list[Tensor]:
        with other_random_numbers():
            return forward(values)

    for positive in (None, False, True):
        values, rounding = inputs, 1.0
        if positive is not None:
            values, rounding = [random_like(t, positive) for t in inputs], ROUNDING_OF_RANDOM
        try:
            if not follows_order(
                forward, run_otherwise, values, places, [there], other_order, rounding
            ):
                return False
        except FAILURES:  # the function does not accept such values
            continue
    return True


def try_sum(call: Call, which: int) -> bool:
    """Return whether a call's output is a sum over samples.

    Indices and labels are not changed: a sum may be weighted by them (`is_weighted`).
    """
    floats = [(x, at) for x, at in call.carriers if x.is_floating_point()]
    return _is_sum(call.with_carriers(floats), which)


def is_weighted(call: Call, which: int) -> bool:
    """Return whether labels of one sample change the weight of another.

    A mean over the samples that are not ignored does so. Samples are exchanged with their labels.
    """
    if all(x.is_floating_point() for x, _ in call.carriers):
        return False
    return not _is_sum(call, which, random=False)


def _is_sum(call: Call, which: int, random: bool = True) -> bool:
    for dtype in _precisions(call):
        run, inputs = make_runner(call, which, dtype)
        try:
            if not run(inputs)[0].is_floating_point():
                return False
        except FAILURES:
            continue
        return is_sum(run, inputs, [at for _, at in call.carriers], random)
    return False


def try_affine(call: Call, which: int) -> bool:
    """Return whether a call is affine in tensors that are sums over samples."""
    summed = call.with_carriers([(t, Single(1, 0)) for t in call.summed])
    for dtype in _precisions(summed):
        run, inputs = make_runner(summed, which, dtype)
        try:
            return all(_is_affine(run, inputs, size) for size in AFFINE_SIZES for _ in "ab")
        except FAILURES:
            continue
    return False


def _is_affine(run: Run, inputs: list[Tensor], size: float) -> bool:
    """Return whether f(0) + f(a + b) = f(a) + f(b) for random a and b of some size."""
    a, b = ([torch.randn_like(t) * size for t in inputs] for _ in range(2))
    zero = [torch.zeros_like(t) for t in inputs]
    both = [s + t for s, t in zip(a, b, strict=True)]
    ends = [widest(run(x)[0]) for x in (zero, both, a, b)]
    if not all(bool(t.isfinite().all()) for t in ends):
        return False
    scale = max([float(t.abs().max()) for t in ends if t.numel()], default=0.0)
    gap = (ends[0] + ends[1] - ends[2] - ends[3]).abs()
    return not gap.numel() or float(gap.max()) <= AFFINE * scale
