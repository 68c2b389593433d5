"""A trial of a forward: do values of the batch that left torch return and mix samples?

A statistic of the batch that left torch through `.item()`, NumPy or an `if` returns as a constant,
which the tracer cannot see. So the forward runs again, without dropout and without a trace: some of
the samples get the values of others, and the outputs of the rest must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from varreg.devices import seed_generators
from varreg.engine.rehearsal import Rehearsal, rehearsal
from varreg.engine.trace.arguments import replace_tensors, tensors_of
from varreg.engine.trace.layout import Place, Summed, Where
from varreg.engine.trace.trial.sums import is_mean_of_copies, is_sum
from varreg.engine.trace.trial.trial_values import (
    FAILURES,
    Run,
    Verdict,
    are_alike,
    noise_like,
    spread,
)
from varreg.engine.trace.trial.try_separation import follows_order, keeps_apart, stays_among_copies
from varreg.thresholds import CHANGE, COPIES, SPLITS


def try_forward(
    model: nn.Module,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    inputs: Sequence[tuple[Tensor, Place]],
    outputs: Sequence[tuple[int, Where]],
    thorough: bool = True,
    can_reorder: bool = True,
) -> tuple[Verdict, str]:
    """Return the verdict on the outputs of `module.forward`; if it is undecided, also the reason.

    Outputs are named by their position among all returned tensors. A `thorough` trial is also made
    with other parameters, since a gate that is still zero would hide the effect of values. With
    `can_reorder`, nothing in the model depends on the position of a sample: if the samples are
    reordered, the outputs must be reordered in the same way.
    """
    module = unwrap(module)
    places = [place for _, place in inputs]
    rows = [(i, where) for i, where in outputs if isinstance(where, Place)]
    sums = [i for i, where in outputs if isinstance(where, Summed)]
    with rehearsal(model) as rehearsed, torch.enable_grad():
        forward = Rerun(rehearsed, module, args, kwargs, [t for t, _ in inputs])
        try:
            given = _distinct(forward, [t.detach() for t, _ in inputs], places)
        except FAILURES as error:
            return Verdict.UNDECIDED, str(error)
        for is_changed in (False, True) if thorough else (False,):
            if is_changed:
                forward.changes = _changes(model)
                can_reorder = False  # once is enough: parameters do not change the order
            if rows:
                verdict, why = _try_rows(forward, given, places, rows, thorough, can_reorder)
                if verdict is Verdict.UNDECIDED and is_changed:
                    continue  # the forward does not accept other parameters
                if verdict is not Verdict.APART:
                    return verdict, why
            copies = thorough and not is_changed
            if sums and not _are_sums(forward.outputs(sums), given, places, copies):
                return Verdict.MIXED, ""
    return Verdict.APART, ""


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module without a wrapper whose forward would communicate with other processes."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


class Rerun:
    """The forward of a module, run again with other inputs, each time from the same state."""

    def __init__(
        self,
        rehearsed: Rehearsal,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
    ):
        self.rehearsed, self.module, self.args, self.kwargs = rehearsed, module, args, kwargs
        self.inputs = inputs
        self.changes: list[tuple[Tensor, Tensor]] = []
        """Parameters, each with the change that is added to it in each run."""

    def run(self, values: list[Tensor], seed: int | None = None) -> list[Tensor]:
        """Return all tensors that the forward returns for other values of the inputs."""
        self.rehearsed.reset()
        if seed is not None:
            seed_generators(seed)
        with torch.no_grad():
            for p, change in self.changes:
                p.add_(change)
        # Copies, also of unchanged inputs: a forward may write into its inputs.
        new = {id(t): t.detach().clone() for t in tensors_of((self.args, self.kwargs))}
        new |= {id(t): v.clone() for t, v in zip(self.inputs, values, strict=True)}
        args, kwargs = replace_tensors(self.args, new), replace_tensors(self.kwargs, new)
        return [t.detach() for t in tensors_of(self.module.forward(*args, **kwargs))]

    def outputs(self, which: Sequence[int], seed: int | None = None) -> Run:
        """Return a function from the inputs to some of the outputs, by their positions."""

        def run(values: list[Tensor]) -> list[Tensor]:
            tensors = self.run(values, seed)
            return [tensors[i] for i in which]

        return run


def _try_rows(
    forward: Rerun,
    given: list[Tensor],
    places: Sequence[Place],
    rows: Sequence[tuple[int, Place]],
    thorough: bool,
    can_reorder: bool,
) -> tuple[Verdict, str]:
    """Return the verdict on outputs that carry the batch; if it is not APART, also the reason."""
    which, output_places = [i for i, _ in rows], [place for _, place in rows]
    run, few = forward.outputs(which), SPLITS[0 if thorough else 1]
    verdict = keeps_apart(
        run, given, places, output_places, needs_proof=False, padded=True, few=few
    )
    if verdict is not Verdict.APART:
        return verdict, "it does not accept samples in another order"
    if not stays_among_copies(run, given, places, output_places, COPIES[0 if thorough else 1]):
        return Verdict.MIXED, ""
    if thorough and can_reorder:
        run_otherwise = forward.outputs(which, seed=1)
        if not follows_order(run, run_otherwise, given, places, output_places, _next_in_turn):
            return Verdict.MIXED, ""
    return Verdict.APART, ""


def _next_in_turn(batch: int) -> Tensor:
    return torch.arange(batch, device="cpu").roll(1)


def _are_sums(run: Run, given: list[Tensor], places: Sequence[Place], copies: bool) -> bool:
    """Return whether outputs without a batch are sums over samples.

    Try it with `copies` of each sample, too.
    """
    if not is_sum(run, given, places, random=False):
        return False
    return not copies or is_mean_of_copies(run, given, places)


def _distinct(forward: Rerun, given: list[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """Return input values in which samples differ, if the forward accepts such values.

    If all samples are equal, an exchange shows nothing.
    """
    new = [
        t + noise_like(t) if t.is_floating_point() and are_alike(t, place) else t
        for t, place in zip(given, places, strict=True)
    ]
    try:
        forward.run(new)
    except FAILURES:
        forward.run(given)
        return given
    return new


def _changes(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return a small random change of each parameter."""
    return [
        (p, torch.randn_like(p) * (CHANGE * spread(p) or CHANGE))
        for p in model.parameters()
        if not is_lazy(p) and p.is_floating_point() and p.numel() and not p.is_meta
    ]
