"""Verify a copy of a model, or the model itself if it cannot be copied; and again in float64 if
needed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from varreg.engine.rehearsal import Rehearsal, rehearsal
from varreg.engine.rehearsal.pauses import ledgers_aside
from varreg.thresholds import NOISE
from varreg.verification.comparison import compare_samples
from varreg.verification.gaps import Sums, noise_of
from varreg.verification.result import Verification
from varreg.verification.samples import Loss, Selection
from varreg.verification.steps import Steps
from varreg.verification.tolerance import FLOAT64_RTOL, Setting


def verify_precisely(
    model: nn.Module, loss: Loss | None, selection: Selection, setting: Setting
) -> Verification:
    """Verify, and return the result. If numbers differ, verify again in float64, to see whether the
    difference is rounding.

    A gap counts as rounding if float64 shows no gap, and if torch itself has gaps as large in the
    model's precision: between single samples and float64, or between the batch without varreg and
    single samples. The latter happens at a kink: an activation that is 0 up to rounding may pass a
    ReLU in the batch, but not alone.
    """
    first, sums = _verify_safely(model, loss, selection, setting)
    if first.status != "different" or setting.rtol <= FLOAT64_RTOL:
        return first
    try:
        copies = _copy(model, loss)
        if copies is None:
            return first
        for module in copies:
            if isinstance(module, nn.Module):
                module.double()
        again, truth = _verify_safely(
            *copies, selection.to(torch.float64), setting._replace(rtol=FLOAT64_RTOL)
        )
    except Exception:  # the model may run in one precision only
        return first
    if again.status == "different":
        return again
    noise = noise_of(sums, truth, setting.floor) if again else {}
    is_rounding = all(
        row.grad <= max(first.rtol, NOISE * noise.get(row.parameter, 0.0))
        and row.gap <= max(first.rtol, NOISE * max(noise.get(row.parameter, 0.0), row.batch))
        for row in first.rows
    )
    return again if noise and is_rounding else first


def _verify_safely(
    model: nn.Module, loss: Loss | None, selection: Selection, setting: Setting
) -> tuple[Verification, dict[str, Sums]]:
    """Verify a copy of the model, or the model itself if it cannot be copied. Return the result,
    and the sums of the gradients of single samples.

    A copy may still use the original: a function that its forward calls may hold the original
    model. Then the original has gradients afterwards, and is verified in place.
    """
    with _rehearse(model, loss) as original:
        copies = _copy(model, loss)
        if copies is not None:
            # Only the inner rehearsal switches dropout, which is on in one of its steps.
            with original.with_dropout(), _rehearse(*copies) as inner:
                compared = compare_samples(Steps(*copies, selection, inner), setting)
            if all(p.grad is None for p in model.parameters()):
                return compared
            original.reset()
        with ledgers_aside(model):
            return compare_samples(Steps(model, loss, selection, original), setting)


def _copy(model: nn.Module, loss: Loss | None) -> tuple[nn.Module, Loss | None] | None:
    """Return copies of model and loss, made together, since they may share parameters; None if that
    fails.
    """
    try:
        if isinstance(loss, nn.Module):
            return copy.deepcopy((model, loss))
        return copy.deepcopy(model), loss
    except Exception:  # a user's object may raise anything when it is copied
        return None


@contextlib.contextmanager
def _rehearse(model: nn.Module, loss: Loss | None) -> Iterator[Rehearsal]:
    """Rehearse the model, and the loss if it is a module whose state must be restored."""
    with rehearsal(nn.ModuleList([model, loss] if isinstance(loss, nn.Module) else [model])) as run:
        yield run
