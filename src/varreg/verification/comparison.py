"""One verification: run the steps, compare their numbers, and return the result."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from varreg.verification.causes import explain
from varreg.verification.gaps import Sums, compare_moments
from varreg.verification.observed_steps import measure
from varreg.verification.result import CannotVerify, Verification
from varreg.verification.sample_part import compare_part
from varreg.verification.steps import Step, Steps
from varreg.verification.tolerance import Setting


def compare_samples(steps: Steps, setting: Setting) -> tuple[Verification, dict[str, Sums]]:
    """Return the result, and the sums of the gradients of single samples."""
    try:
        with warnings.catch_warnings():
            # Ignore varreg's warnings: the comparison itself shows their causes.
            warnings.filterwarnings("ignore", message="varreg: ")
            return _compare_samples(steps, setting)
    except CannotVerify as error:
        return replace(error.verification, samples=steps.size), {}


def _compare_samples(steps: Steps, setting: Setting) -> tuple[Verification, dict[str, Sums]]:
    n, rtol = steps.size, setting.rtol
    batch_step = steps.run_batch()
    randomness = steps.check_randomness(batch_step)
    measurement = measure(steps, setting)
    sums, outputs = _sum_singles(steps, batch_step)
    rows = compare_moments(sums, batch_step.grads, measurement, setting)
    if max(row.gap for row in rows) <= rtol and not outputs > rtol:  # outputs may be nan
        return Verification("verified", "", "", n, rtol, rows, outputs), sums
    if randomness is not None:
        raise randomness
    result = Verification("different", "", "", n, rtol, rows, outputs)
    return explain(result, steps, batch_step, measurement, setting), sums


def _sum_singles(steps: Steps, batch_step: Step) -> tuple[dict[str, Sums], float]:
    """Return the sums of the gradients of single samples, and the largest gap of outputs."""
    sums, n = {name: Sums(p) for name, p in steps.params.items()}, steps.size
    gaps = []
    for i in range(n):
        step = steps.run_single(i)
        for name, grad in step.grads.items():
            sums[name].add(grad)
        if len(step.outputs) == len(batch_step.outputs):
            pairs = zip(batch_step.outputs, step.outputs, strict=True)
            parts = [compare_part(a, b, i, n) for a, b in pairs]
            gaps += [part.gap for part in parts if part is not None and part.has_rows]
    return sums, max(gaps, default=math.nan)
