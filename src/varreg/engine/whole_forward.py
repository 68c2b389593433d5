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
from torch.nn.parameter import is_lazy

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
    thorough: bool = True,
) -> tuple[Verdict, str]:
    """Return what a trial of `module.forward` says of the outputs, named by their position among
    all tensors that it returns; and why, if it says nothing.

    A `thorough` one is made with other parameters as well: behind a gate that is still zero, nothing
    can be seen.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module  # its own forward would talk to other processes
    given = [t.detach() for t, _ in inputs]
    at = [place for _, place in inputs]
    rows = [(i, where) for i, where in outputs if isinstance(where, Place)]
    sums = [i for i, where in outputs if isinstance(where, Summed)]
    with rehearsal(model) as rehearsed, torch.enable_grad():
        changes: list[tuple[Tensor, Tensor]] = []

        def run(values: list[Tensor]) -> list[Tensor]:
            rehearsed.reset()
            with torch.no_grad():
                for p, change in changes:
                    p.add_(change)
            # Copies, of the others too: a forward may write into what it is given.
            new = {id(t): t.detach().clone() for t in tensors_of((args, kwargs))}
            new |= {id(t): v.clone() for (t, _), v in zip(inputs, values, strict=True)}
            out = module.forward(*replace_tensors(args, new), **replace_tensors(kwargs, new))
            return [t.detach() for t in tensors_of(out)]

        def chosen(which: Sequence[int]) -> Any:
            return lambda values: [run(values)[i] for i in which]

        try:
            run(given)
        except FAILURES as error:
            return Verdict.UNDECIDED, str(error)
        for others in (False, True) if thorough else (False,):
            changes += _changes(model) if others else []
            if rows:
                places, carriers = [where for _, where in rows], chosen([i for i, _ in rows])
                few = 2 if thorough else 1
                options: dict[str, Any] = {"needs_proof": False, "padded": True, "few": few}
                said = keeps_apart(carriers, given, at, places, **options)
                if said is Verdict.UNDECIDED and others:
                    continue  # it does not take other parameters
                if said is not Verdict.APART:
                    return said, "it does not take samples in another order"
                if not all_alike(carriers, given, at, places, 8 if thorough else 2):
                    return Verdict.MIXED, ""
            if sums and not is_sum(chosen(sums), given, at, random=False):
                return Verdict.MIXED, ""
    return Verdict.APART, ""


def _changes(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return a small random change of each parameter."""
    found: list[tuple[Tensor, Tensor]] = []
    for p in model.parameters():
        if not is_lazy(p) and p.is_floating_point() and p.numel() and not p.is_meta:
            size = float(p.detach().double().std()) if p.numel() > 1 else 0.0
            found.append((p, torch.randn_like(p) * (0.1 * size or 0.1)))
    return found
