"""Names of parameters for messages."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from varreg.engine.parameters import LEDGERS


def names(optimizer: Optimizer) -> dict[Tensor, str]:
    """Return a name for each parameter: its name in the optimizer, or in the observed model, or its
    position in the param groups.
    """
    out = {}
    for i, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", [None] * len(group["params"]))
        for j, (p, name) in enumerate(zip(group["params"], given, strict=True)):
            ledger = LEDGERS.get(p)
            place = f"param_groups[{i}]['params'][{j}]"
            out[p] = name or (place if ledger is None else ledger.name)
    return out
