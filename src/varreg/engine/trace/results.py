"""Where the results of a call carry the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine import deferred
from varreg.engine.ledger import Ledger
from varreg.engine.marks import DERIVED, Derived
from varreg.engine.trace.arguments import results
from varreg.engine.trace.call import Call
from varreg.engine.trace.follow import Gone, Guess, follow, index_of
from varreg.engine.trace.functions import DETACH, ELEMENTWISE, MOVERS, SUMS
from varreg.engine.trace.layout import Lost, Place, Ragged, Single, Summed, Where
from varreg.engine.trace.plans import Plan, store_plan
from varreg.engine.trace.trace import Trace
from varreg.engine.trace.trial import Verdict, has_rows_for_samples
from varreg.errors import MeasurementError, VarregError


def place_result(trace: Trace, call: Call, out: Tensor, which: int) -> Where:
    """Return where the batch is in a result. If that is not known, a trial finds it, once for each
    kind of call.
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


def _try_guess(
    trace: Trace, call: Call, guess: Guess, out: Tensor, which: int
) -> Place | Lost | Gone:
    """Return the first of several places that a trial confirms."""
    if trace.lets_samples_meet:
        return guess.places[0] if guess.places else Gone(is_linear=False)
    if has_rows_for_samples(call):
        call.form = None  # values of a constant may say which samples meet: no plan holds
    is_mixed = False
    for place in guess.places:
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
    if call.name in ("nanmean", "nanmedian"):  # values decide what counts
        return lost
    if any(isinstance(at, Ragged) and at.repeats for _, at in call.carriers):
        return Lost(f"{call.name} adds up some samples twice, and others not at all", mixed=True)
    if not gone.is_linear:
        if not trace.verdicts.of_sum(call, which):
            return lost
        key = ("weighted", call.function, trace.observer.forward.path())
        if trace.verdicts.due(key) and trace.verdicts.of_weights(call, which):
            trace.observer.notices.weighted(trace.observer.forward.path(), call.name)
    return Summed(trace.batch)


def mark_results(trace: Trace, plans: dict[Any, Plan], call: Call, out: Any) -> None:
    """Mark the results of a call without a use; keep a plan, if it holds for all of its form."""
    if call.lost or call.summed:
        where = _combined(trace, call)
        trace.mark_each(out, lambda t, i: where or place_result(trace, call, t, i))
    elif call.carriers:
        trace.mark_each(out, lambda t, i: place_result(trace, call, t, i))
        # Aliases of a detached tensor, and views that are written to, must be noted in each
        # forward: a plan would skip that.
        writes_other = call.is_in_place and call.args[0] is not call.carriers[0][0]
        if call.function not in DETACH and not writes_other:
            store_plan(plans, call, Plan(), results(out))
    elif torch.is_grad_enabled():
        mark_derived(trace, out)
        if call.function is F.embedding:
            _note_lookup(trace, out, *call.args, **call.kwargs)


def mark_derived(trace: Trace, out: Any) -> None:
    """Mark results that are made of parameters alone."""

    def derived(t: Tensor, _: int) -> Derived | None:
        return DERIVED if t.requires_grad else None

    trace.mark_each(out, derived)


def _combined(trace: Trace, call: Call) -> Where | None:
    """Return the kind of the result of a call with lost or summed tensors; None if these tensors do
    not matter.
    """
    if call.lost:
        if call.carriers and not any(t.is_floating_point() for t, _ in call.lost):
            index = {id(t) for t in index_of(call)} if call.function in MOVERS else set()
            lost_ids = {id(t) for t, _ in call.lost}
            if call.function in ELEMENTWISE or lost_ids <= index:  # masks, and where to route
                trace.escape(call.function, _answer(call.lost[0][0]))
                return None
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


def _answer(choice: Tensor) -> bool | None:
    """Return the value of a condition on the whole batch, if it is True or False for all samples
    and can be read without waiting.
    """
    if choice.dtype is not torch.bool or not choice.is_cpu:
        return None
    return False if not choice.any() else True if choice.all() else None


def _note_lookup(
    trace: Trace,
    out: Tensor,
    ids: Tensor,
    table: Tensor,
    padding_idx: int | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Note rows of a parameter that were looked up once for all samples: their contributions can be
    added to the table without calling autograd.
    """
    rows = ids.flatten()
    skipped = None if padding_idx is None else padding_idx % len(table)
    ledger = trace.observer.parameters.ledger(table)
    if ledger and _are_distinct(rows, skipped, ledger):
        trace.lookups[id(out)] = (out, out.grad_fn, rows)


def _are_distinct(rows: Tensor, skipped: int | None, ledger: Ledger) -> bool:
    """Return whether each row is looked up once, and the padding row is not looked up.

    On a device, the rows are read the first time for each number of rows. Later, rows that were
    distinct are assumed to be distinct again, and a deferred check confirms that.
    """
    known = ledger.distinct_rows.get(len(rows)) if not rows.is_cpu else None
    if known is False:
        return False
    ordered = rows.sort().values
    repeats = (ordered[1:] == ordered[:-1]).any()
    if skipped is not None:
        repeats = repeats | (rows == skipped).any()
    if known is None:
        known = ledger.distinct_rows[len(rows)] = not bool(repeats)
        return known

    def complain() -> None:
        ledger.distinct_rows[len(rows)] = False
        raise MeasurementError(
            f"varreg: rows of '{ledger.name}' were looked up once for all samples, and some of "
            "them twice, which was not so before with as many rows. The moments of this backward "
            "are wrong; later ones will be right. Clear gradients and go on."
        )

    deferred.check(repeats, complain)
    return True
