"""Mark the results of a call that uses no parameter. `decide.py` decides what the marks are."""

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
from varreg.engine.trace.decide import place_combined, place_result
from varreg.engine.trace.functions import DETACH
from varreg.engine.trace.plans import Plan, store_plan
from varreg.engine.trace.trace import Trace
from varreg.errors import MeasurementError


def mark_results(trace: Trace, plans: dict[Any, Plan], call: Call, out: Any) -> None:
    """Mark the results of a call without a use. Store a plan, if it is valid for all calls with its
    key.
    """
    if call.lost or call.summed:
        where = place_combined(trace, call)
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


def _note_lookup(
    trace: Trace,
    out: Tensor,
    ids: Tensor,
    table: Tensor,
    padding_idx: int | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Note rows of a parameter that are looked up, the same for all samples: their contributions
    can be added to the table without calling autograd.
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
            f"varreg: a lookup in '{ledger.name}' that is the same for all samples has a row "
            "twice. Earlier lookups of as many rows had none twice, and varreg relied on that. The "
            "moments of this backward are wrong; later ones will be right. Clear gradients and go "
            "on."
        )

    deferred.check(repeats, complain)
    return True
