"""A trial of a forward with one sample alone, to see whether the number of samples changes its
output.

`h / len(x)` lets no samples meet, and no tracer can see it: a number of Python's carries no mark.
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
from varreg.engine.trace.trial.rerun import Forward, unwrap
from varreg.engine.trace.trial.trial_values import FAILURES, is_close, shuffle, shuffle_all


def depends_on_number(
    model: nn.Module,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    inputs: Sequence[tuple[Tensor, Place]],
    outputs: Sequence[tuple[int, Where]],
) -> bool:
    """Return whether rows of some sample differ from what the forward returns for it alone.

    Where that cannot be run, or random numbers decide, the answer is no.
    """
    places = [place for _, place in inputs]
    rows = [(i, at) for i, at in outputs if isinstance(at, Layout)]
    if not rows or not all(isinstance(at, Layout) for at in places):
        return False
    with rehearsal(model) as rehearsed, torch.enable_grad():
        forward = Forward(rehearsed, unwrap(module), args, kwargs, [t for t, _ in inputs])
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
        except FAILURES:  # it does not take a sample alone
            return False
    return False


def _differ(a: Tensor | None, b: Tensor) -> bool:
    """Return whether two tensors of one shape differ by more than kernels for other sizes do."""
    if a is None or a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return False
    gap = float((widest(a) - widest(b)).abs().max())
    return gap > math.sqrt(torch.finfo(a.dtype).eps) * float(widest(a).abs().max())
