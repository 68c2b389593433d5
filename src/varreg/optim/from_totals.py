"""Steps on a model that is measured by sums over elements only (`observe(model, per="model")`).

λ of a tensor or of the model needs Σσ² and Σδ̄² only. If the increment is linear in the gradients,
the variance of each element may be replaced by the mean variance: no sum changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from varreg.engine import Moments, Totals
from varreg.engine.contribution import stat_dtype
from varreg.engine.totals_ledger import TotalsLedger, lengths
from varreg.errors import VarregError
from varreg.optim.parameter_names import names
from varreg.optim.scopes import SCOPES
from varreg.thresholds import SAME_LENGTH

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from varreg.optim.increments import Increment


def as_moments(
    optimizer: Optimizer,
    group: dict[str, Any],
    increment: Increment,
    p: Tensor,
    ledger: Any,
    m: Totals,
) -> Moments:
    """Return moments of a parameter that have the measured sums. Raise a VarregError if the step
    needs more than sums.
    """
    assert isinstance(ledger, TotalsLedger)
    assert p.grad is not None
    kind = type(optimizer).__name__
    if SCOPES[group["per"]].needs_elements:
        raise VarregError(
            f"varreg: {kind} with per={group['per']!r} needs the variance of each element, and "
            f"'{ledger.name}' is observed with per='model' or per='tensor', which keep sums over "
            f"elements alone. Use {kind}(..., per='model'), or varreg.observe(model)."
        )
    if not increment.is_linear:
        raise VarregError(
            f"varreg: the increment of {kind} divides each element by a number of its own, so that "
            f"its variance needs that of each element, and '{ledger.name}' is observed with "
            "per='model' or per='tensor', which keep sums over elements alone. Use "
            "varreg.observe(model), or VRSGD."
        )
    S1, S2 = float(ledger.length1), float(m.length2)
    g1, g2 = map(float, lengths(p.grad))
    kappa = math.sqrt(g2 / S2) if S2 and math.isfinite(g2) else 1.0
    slack = max(SAME_LENGTH, m.eps, ledger.precision)
    if S2 and math.isfinite(g2) and not math.isclose(g1, kappa * S1, rel_tol=slack):
        raise VarregError(
            f"varreg: the gradient of '{names(optimizer)[p]}' was changed element by element (for "
            "example by clip_grad_value_), and with per='model' or per='tensor' only sums were "
            "measured. Clip by norm, or observe the model with varreg.observe(model)."
        )
    total = p.grad.detach().to(stat_dtype(p.grad.dtype), copy=True)
    if not S2:
        total.zero_()
    elif not math.isclose(kappa, 1.0, rel_tol=SAME_LENGTH):
        total.div_(kappa)  # clipped, or unscaled
    spread = float(m.spread) * m.count - S2
    each = max(spread, 0.0) / max(m.elements, 1)
    square = total.square().add_(each).div_(m.count)
    return Moments(m.count, m.groups, total, square, m.reduction)
