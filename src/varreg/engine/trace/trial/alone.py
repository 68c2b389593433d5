"""A trial of a forward with one sample alone: does the number of samples change its output?

`h / len(x)` mixes no samples, but depends on their number. The tracer cannot see that, since a
Python number has no mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varreg.devices import widest
from varreg.engine.rehearsal import rehearsal
from varreg.engine.trace.layout import Layout, Place, Where
from varreg.engine.trace.trial.rerun import Rerun, unwrap
from varreg.engine.trace.trial.trial_values import FAILURES, is_close, shuffle, shuffle_all


def depends_on_number(
    model: nn.Module,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    inputs: Sequence[tuple[Tensor, Place]],
    outputs: Sequence[tuple[int, Where]],
) -> bool:
    """Return whether the outputs of some sample change in a forward with this sample alone.

    Return False if such a forward cannot run, or if its result is random.
    """
    places = [place for _, place in inputs]
    rows = [(i, at) for i, at in outputs if isinstance(at, Layout)]
    if not rows or not all(isinstance(at, Layout) for at in places):
        return False
    with rehearsal(model) as rehearsed, torch.enable_grad():
        forward = Rerun(rehearsed, unwrap(module), args, kwargs, [t for t, _ in inputs])
        run = forward.outputs([i for i, _ in rows])
        run_otherwise = forward.outputs([i for i, _ in rows], seed=1)
        given = [t.detach() for t, _ in inputs]
        try:
            before, again = run(given), run_otherwise(given)
            if not all(bool(is_close(a, b).all()) for a, b in zip(before, again, strict=True)):
                return False
            for number in (0, places[0].batch - 1):
                one = torch.tensor([number], device="cpu")
                after = run(shuffle_all(given, places, one))
                for a, (_, at), b in zip(before, rows, after, strict=True):
                    if _differ(shuffle(a, at, one), b):
                        return True
        except FAILURES:  # the forward does not accept a single sample
            return False
    return False


def _differ(a: Tensor | None, b: Tensor) -> bool:
    """Return whether two tensors of one shape differ by more than rounding in kernels for different
    sizes.
    """
    if a is None or a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return False
    gap = float((widest(a) - widest(b)).abs().max())
    return gap > math.sqrt(torch.finfo(a.dtype).eps) * float(widest(a).abs().max())
