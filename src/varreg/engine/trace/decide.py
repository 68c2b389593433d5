"""Decide where a result of a call carries the batch: the function is known, tried, or refused.

`place_result` decides, for each result of each call that has no plan:

1. *Known*: a function in `follow/` derives the place from the arguments. `follow` looks it up.
2. *Tried*: for any other function, `follow` returns a `Guess`: places that fit the sizes. A trial
   (`trial/`) runs the function with other values, and confirms one of these places, or none.
3. *Refused*: the result is marked as `Lost` if samples were mixed, or if no place was confirmed.
   `Trace.refuse_later` raises: at once if samples were mixed, otherwise when a gradient arrives.

`place_combined` decides for a call that already has a lost tensor or a sum over samples among its
arguments. The sorting of calls before this decision is in `tracer.py` (`run_new`). Calls that use
parameters go through `mechanisms/choose.py`, which also refuses the uses that cannot be measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from varreg.engine.trace.call import Call
from varreg.engine.trace.follow import KNOWN, Destination, Gone, Guess, guess, index_of
from varreg.engine.trace.functions import ELEMENTWISE, MOVERS, SUMS, WRITERS
from varreg.engine.trace.layout import (
    Layout,
    Lost,
    Place,
    Ragged,
    Single,
    Summed,
    Where,
    only_sample,
)
from varreg.engine.trace.trace import Trace
from varreg.engine.trace.trial import Verdict, has_rows_for_samples
from varreg.errors import VarregError


def place_result(trace: Trace, call: Call, out: Tensor, which: int) -> Where:
    """Return where a result carries the batch, or that it is lost or a sum. If the function is not
    known, a trial decides, once for each kind of call.
    """
    if out.is_nested:
        raise VarregError(
            f"varreg: in {trace.observer.forward.path()}, {call.name} makes a nested tensor, in "
            "which samples cannot be followed. Use padded, dense tensors."
        )
    destination = follow(call, out, which)
    if isinstance(destination, Guess):
        destination = _try_guess(trace, call, destination, out, which)
    if isinstance(destination, Gone):
        return _without_batch(trace, call, destination, out, which)
    return destination


def follow(call: Call, out: Tensor, which: int) -> Destination:
    """Return where `out`, the result number `which` of a call, carries the batch, as far as that is
    known without a trial.
    """
    places = {at for _, at in call.carriers}
    if all(at.batch == 1 for at in places):
        return only_sample(out)
    if all(at.batch == 0 for at in places) and 0 in out.shape:
        return Layout(0, list(out.shape).index(0))
    if len(places) == 1 and call.function not in WRITERS:
        (place,) = places
        if isinstance(place, Single):
            return place  # made of one sample and constants: the output belongs to that sample
    known = KNOWN.get(call.function)
    return guess(call.carriers, out) if known is None else known(call, out, which)


def _try_guess(
    trace: Trace, call: Call, guessed: Guess, out: Tensor, which: int
) -> Place | Lost | Gone:
    """Return the first guessed place that a trial confirms. If there is none, the result is lost or
    has no batch.
    """
    if trace.lets_samples_meet:
        return guessed.places[0] if guessed.places else Gone(is_linear=False)
    if has_rows_for_samples(call):
        call.key = None  # values of a constant may decide which samples meet: no plan is valid
    is_mixed = False
    for place in guessed.places:
        verdict = trace.verdicts.of_call(call, place, which)
        if verdict is Verdict.APART:
            return place
        is_mixed |= verdict is Verdict.MIXED
    if not is_mixed or not out.dim() or not out.requires_grad:
        return Gone(is_linear=False)
    return Lost(f"{call.name} mixes samples, or changes their order", mixed=True)


def _without_batch(trace: Trace, call: Call, gone: Gone, out: Tensor, which: int) -> Summed | Lost:
    """Return the kind of a result that has no place: a sum over samples, or lost."""
    shapes = " and ".join(str(tuple(x.shape)) for x, _ in call.carriers)
    lost = Lost(f"{call.name} takes {shapes} to {tuple(out.shape)}")
    if trace.lets_samples_meet or not (out.requires_grad and out.is_floating_point()):
        return lost
    if call.name in ("nanmean", "nanmedian"):  # values decide which elements count
        return lost
    if any(isinstance(at, Ragged) and at.repeats for _, at in call.carriers):
        return Lost(f"{call.name} adds up some samples twice, and others not at all", mixed=True)
    if not gone.is_linear:
        if not trace.verdicts.of_sum(call, which):
            return lost
        key = ("weighted", call.function, trace.observer.forward.path())
        if trace.verdicts.is_due(key) and trace.verdicts.of_weights(call, which):
            trace.observer.notices.weighted(trace.observer.forward.path(), call.name)
    return Summed(trace.batch)


def place_combined(trace: Trace, call: Call) -> Where | None:
    """Return the kind of the result of a call with lost or summed tensors; None if these tensors do
    not matter.
    """
    if call.lost:
        if call.carriers and not any(t.is_floating_point() for t, _ in call.lost):
            index = {id(t) for t in index_of(call)} if call.function in MOVERS else set()
            lost_ids = {id(t) for t, _ in call.lost}
            if call.function in ELEMENTWISE or lost_ids <= index:  # a mask, or an index
                trace.escape(call.function, _answer(call.lost[0][0]))
                return None
        refuse_grouped(trace, call)
        lost = call.lost[0][1]
        if not call.carriers or lost.mixed:
            return lost
        return Lost(f"{call.name} combines samples with the result of: {lost.why}", mixed=True)
    if call.carriers:
        if call.function in SUMS and all(isinstance(at, Single) for _, at in call.carriers):
            return Summed(trace.batch)  # one more sample's loss is added
        return Lost(f"{call.name} combines samples with a sum over the batch", mixed=True)
    if trace.lets_samples_meet or trace.verdicts.of_affine(call, 0):
        return Summed(trace.batch)
    return Lost(f"{call.name} is not linear in a sum over the batch", mixed=True)


def refuse_grouped(trace: Trace, call: Call) -> None:
    """Refuse products of grouped rows, such as `torch.nn.functional.grouped_mm`: rows of all
    samples are sorted by expert, and a tensor tells where each expert begins. Several functions do
    this, also outside of torch.
    """
    needs_gradient = any(t.requires_grad for t in call.tensors()) and torch.is_grad_enabled()
    if "grouped_mm" in call.name and call.lost and needs_gradient and not trace.lets_samples_meet:
        raise VarregError(
            f"varreg: in {trace.observer.forward.path()}, {call.name} multiplies rows of all "
            "samples, sorted by expert, and varreg does not follow that. In a model of "
            "transformers, call model.set_experts_implementation('eager'), or 'batched_mm': both "
            "are exact. Otherwise, multiply the rows of each expert by themselves."
        )


def _answer(choice: Tensor) -> bool | None:
    """Return the value of a condition on the whole batch, if it is True or False for all samples
    and can be read without waiting.
    """
    if choice.dtype is not torch.bool or not choice.is_cpu:
        return None
    return False if not choice.any() else True if choice.all() else None
