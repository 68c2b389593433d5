"""A trial of a whole forward: do values of the batch that left torch come back and mix samples?

A statistic of the batch that left through `.item()`, NumPy or an `if` comes back as a constant, and
no tracer sees it. So the forward is run again, without dropout and without a trace: some of the
samples get the values of others, and the outputs of the rest must not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varreg.engine.arguments import replace_tensors, tensors_of
from varreg.engine.layout import Place, Summed, Where
from varreg.engine.rehearsal import rehearsal
from varreg.engine.trial import FAILURES, Verdict, all_alike, is_sum, keeps_apart


def try_forward(
    model: nn.Module,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    inputs: Sequence[tuple[Tensor, Place]],
    outputs: Sequence[tuple[int, Where]],
) -> tuple[Verdict, str]:
    """Return what a trial of `module.forward` says of the outputs, named by their position among
    all tensors that it returns; and why, if it says nothing."""
    given = [t.detach() for t, _ in inputs]
    at = [place for _, place in inputs]
    rows = [(i, where) for i, where in outputs if isinstance(where, Place)]
    sums = [i for i, where in outputs if isinstance(where, Summed)]
    with rehearsal(model) as rehearsed, torch.no_grad():

        def run(values: list[Tensor]) -> list[Tensor]:
            rehearsed.reset()
            # Copies, of the others too: a forward may write into what it is given.
            new = {id(t): t.detach().clone() for t in tensors_of((args, kwargs))}
            new |= {id(t): v.clone() for (t, _), v in zip(inputs, values, strict=True)}
            out = module.forward(*replace_tensors(args, new), **replace_tensors(kwargs, new))
            return tensors_of(out)

        def chosen(which: Sequence[int]) -> Any:
            return lambda values: [run(values)[i] for i in which]

        try:
            run(given)
        except FAILURES as error:
            return Verdict.UNDECIDED, str(error)
        if rows:
            places, carriers = [where for _, where in rows], chosen([i for i, _ in rows])
            said = keeps_apart(carriers, given, at, places, needs_proof=False)
            if said is not Verdict.APART:
                return said, "it does not take samples in another order"
            if not all_alike(carriers, given, at, places):
                return Verdict.MIXED, ""
        if sums and not is_sum(chosen(sums), given, at, random=False):
            return Verdict.MIXED, ""
    return Verdict.APART, ""
