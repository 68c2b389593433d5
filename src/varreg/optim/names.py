"""What to call a parameter, and the one warning about parameters that nothing was observed of."""

from __future__ import annotations

import warnings

from torch import Tensor
from torch.optim import Optimizer

from varreg.engine.ledger import LEDGERS


def names(optimizer: Optimizer) -> dict[Tensor, str]:
    """By the name that the optimizer was given, or the observed model has for it, or its place in the param groups."""
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", [None] * len(group["params"]))
        for j, (p, name) in enumerate(zip(group["params"], given, strict=True)):
            ledger = LEDGERS.get(p)
            found[p] = name or (ledger.name if ledger is not None else f"param_groups[{i}]['params'][{j}]")
    return found


def warn_missing(optimizer: Optimizer, parameters: list[Tensor], warned: set[int]) -> None:
    """One warning for all parameters that have a gradient and no variance; none for those that were named before, or whose gradient is 0."""
    new = [p for p in parameters if id(p) not in warned and p.grad is not None and (p.grad.is_sparse or bool(p.grad.any()))]
    if not new:
        return
    warned.update(map(id, new))
    name = names(optimizer)
    warnings.warn(
        f"varreg: {type(optimizer).__name__} has a gradient but no gradient variance for {', '.join(f'{name[p]!r} {tuple(p.shape)}' for p in new)}: "
        "the plain step is taken there (λ = 1). Call varreg.observe(model) before the forward pass, with at least two groups, and let "
        "the gradient be the one that was measured; or put these parameters into a group of their own with s=0.",
        stacklevel=6,
    )
