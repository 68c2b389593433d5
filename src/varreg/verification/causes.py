"""Find the cause of a difference: the model, its loss, or varreg."""

from __future__ import annotations

from dataclasses import replace

import torch

from varreg.thresholds import MOST_WEIGHED, NOISE, SAME_FACTOR
from varreg.verification import reasons
from varreg.verification.gaps import Sums, compare_moments
from varreg.verification.observed_steps import Measurement
from varreg.verification.parting import Parting, find_parting
from varreg.verification.reasons import Reason
from varreg.verification.result import Verification
from varreg.verification.steps import Step, Steps
from varreg.verification.tolerance import Setting
from varreg.verification.weights import explain_loss, flatten, weights_of


def explain(
    result: Verification,
    steps: Steps,
    batch_step: Step,
    measurement: Measurement,
    setting: Setting,
) -> Verification:
    """Return a result whose numbers differ, with the reason and the advice added."""
    is_mixed = max(row.batch for row in result.rows) > setting.rtol
    outputs_differ = result.outputs > setting.rtol
    parting = _find_parting(steps, setting) if is_mixed or outputs_differ else None
    if parting is not None and parting.instead and not outputs_differ:
        parting = None  # batch and samples make different calls, but with the same result
    if parting is not None or outputs_differ:
        return _add(replace(result, parting=parting), reasons.model_mixes(parting))
    if is_mixed:
        return _add(result, _loss_reason(steps, batch_step, measurement, setting))
    mechanism = measurement.mechanisms.get(result.worst.parameter, "")
    return _add(result, reasons.varreg_errs(result.worst, mechanism, setting.rtol))


def _add(result: Verification, reason: Reason) -> Verification:
    return replace(result, reason=reason.reason, advice=reason.advice)


def _find_parting(steps: Steps, setting: Setting) -> Parting | None:
    return find_parting(steps.model, steps.run_forward, steps.size, setting.rtol)


def _loss_reason(
    steps: Steps, batch_step: Step, measurement: Measurement, setting: Setting
) -> Reason:
    """Return what the loss does: it has one factor for all samples, it has a factor for each
    sample, or it mixes samples.
    """
    n, params = steps.size, steps.params
    if n * sum(p.numel() for p in params.values()) > MOST_WEIGHED:
        return reasons.loss_mixes(setting.reduction)
    singles = [steps.run_single(i) for i in range(n)]
    each = torch.stack([flatten(step.grads, params) for step in singles])
    factor = setting.sum_factor(n)
    weights = weights_of(each, flatten(batch_step.grads, params) / factor, setting.rtol)
    losses = torch.tensor([step.loss for step in singles], dtype=torch.float64, device="cpu")
    if weights is None or not explain_loss(weights, losses, batch_step.loss / factor):
        return reasons.loss_mixes(setting.reduction)
    if float(weights.max() - weights.min()) <= SAME_FACTOR * float(weights.abs().max()):
        return reasons.loss_has_factor(float(weights.mean()), n, setting.reduction)
    # compare varreg's moments with those of the weighted gradients
    sums = {name: Sums(p) for name, p in params.items()}
    for weight, step in zip(weights.tolist(), singles, strict=True):
        for name, grad in step.grads.items():
            sums[name].add(None if grad is None else weight * grad)
    rows = compare_moments(sums, batch_step.grads, measurement, setting)
    return reasons.loss_weighs(weights, max(row.gap for row in rows) <= NOISE * setting.rtol)
