"""Plans: what the engine found out about one call is stored, and used for all calls with the
same key. Training repeats the same calls in every step.

The key of a call is everything that decides where it takes the batch and which rule serves it: the
function, the plain arguments, and the shape, type and kind of each tensor. The kind is: a carrier
of the batch, with its place; a parameter; or a constant. Values are not part of the key. If the
result may depend on anything else, the call has no key, and the engine analyses it every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varreg.engine.marks import CONSTANT, MARK, RUNNING, mark_of, payload_of
from varreg.engine.trace.arguments import results
from varreg.engine.trace.follow import goes_by_values, is_known
from varreg.engine.trace.layout import Layout
from varreg.engine.trace.trial import has_rows_for_samples
from varreg.thresholds import MOST_PLANS

if TYPE_CHECKING:
    from varreg.engine.rules import Use
    from varreg.engine.trace.call import Call

Key = tuple[Any, ...]
Result = tuple[torch.Size, tuple[Any, ...]]
"""The shape of a result, and the payload of its mark."""

_PLAIN = frozenset(
    (
        *(int, float, bool, str, type(None), type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
# A mark is a plain tuple (marks.py), so its length tells its kind, without a call.
_LAYOUT = len(Layout._fields)  # a layout
_LAYOUT_WITHOUT_GRADIENTS = _LAYOUT + 1  # a layout, and a flag: marked while gradients were off


def key_of(
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    ledger_of: Callable[[Tensor], Any],
) -> tuple[Key | None, list[Tensor], list[Any]]:
    """Return the key of a call, or None; its tensors; and for each tensor its ledger, or None if
    it is no parameter.

    This runs for every call of a torch function in a forward. It is one loop without Python calls,
    so it reads marks in the same way as `marks.payload_of`.
    """
    number = RUNNING.number
    key: list[Any] = [function]
    tensors: list[Tensor] = []
    ledgers: list[Any] = []
    if kwargs:
        key.append(tuple(kwargs))
        rest = [*args, *kwargs.values()]
        rest.reverse()  # a stack, with the first argument on top
    else:
        rest = [*args[::-1]]
    while rest:
        value = rest.pop()
        kind = type(value)
        if kind in _PLAIN:
            key += (kind, value)  # x[1] is not x[True], and 1 == True
        elif kind is Tensor or kind is nn.Parameter:  # subclasses may behave otherwise
            ledger = where = None
            mark = value.__dict__.get(MARK)
            if mark is not None and mark[0] == number and mark[1] is not CONSTANT:
                where = mark[1]
                if len(where) != _LAYOUT:
                    if len(where) != _LAYOUT_WITHOUT_GRADIENTS or value.requires_grad:
                        return None, tensors, ledgers  # a mark of another kind: no key
                    where = where[:_LAYOUT]  # the tensor still has no gradient: a plain layout
            elif value.requires_grad:
                ledger = ledger_of(value)
                if not ledger:
                    return None, tensors, ledgers
                where = "parameter"
            key += (where, value.shape, value.dtype)
            tensors.append(value)
            ledgers.append(ledger)
        elif kind is tuple or kind is list or kind is torch.Size:
            key += (kind, len(value))
            rest += value[::-1]
        elif kind is slice:
            ends = (value.start, value.stop, value.step)
            if not _PLAIN.issuperset(map(type, ends)):
                return None, tensors, ledgers  # values of a tensor choose the rows
            key += (slice, *ends)
        else:
            return None, tensors, ledgers
    n = len(tensors)
    if n > 1 and (tensors[0] is tensors[1] or (n > 2 and len(set(map(id, tensors))) != n)):
        return None, tensors, ledgers  # x @ x differs from x @ y
    return tuple(key), tensors, ledgers


class Plan:
    """Where the results of a call carry the batch; and the use, if a rule measures parameters in
    the call.
    """

    __slots__ = ("beside", "results", "use")

    def __init__(
        self,
        results: tuple[Result | None, ...] = (),
        use: Use | None = None,
        beside: Use | None = None,
    ):
        self.results = results
        """Shape and mark of each result; None for a result that is no tensor."""
        self.use = use
        self.beside = beside
        """The same use with a rule that does not take over the gradient, for backward passes that
        need not compare it.
        """

    def fits(self, out: Any) -> bool:
        """Return whether results have the shapes that the plan was made for."""
        if isinstance(out, Tensor):
            expected = self.results[0]
            return len(self.results) == 1 and expected is not None and out.shape == expected[0]
        outs = results(out)
        return len(outs) == len(self.results) and all(map(_fits, outs, self.results))

    def mark(self, outs: Sequence[Any]) -> None:
        """Mark results that fit, with the marks in the plan."""
        number = RUNNING.number
        for out, expected in zip(outs, self.results, strict=True):
            if expected is not None:
                out.__dict__[MARK] = (number, expected[1])  # as `marks.mark` does, without a call


def _fits(out: Any, expected: Result | None) -> bool:
    if isinstance(out, Tensor) and expected is not None:
        return out.shape == expected[0]
    return not isinstance(out, Tensor) and expected is None


def store_plan(plans: dict[Key, Plan], call: Call, plan: Plan, outs: Sequence[Any]) -> None:
    """Store a plan with the marks of the results, if they are valid for every call with its key."""
    if call.key is None or call.out is not None or goes_by_values(call):
        return
    if not is_known(call.function) and has_rows_for_samples(call):
        return  # values of a constant may decide which samples mix
    expected: list[Result | None] = []
    for t in outs:
        if not isinstance(t, Tensor):
            expected.append(None)
            continue
        payload = payload_of(t)
        if payload is None or not isinstance(mark_of(t), Layout):
            return
        expected.append((t.shape, payload))
    if len(plans) >= MOST_PLANS:  # dropping all is cheaper than tracking their age
        plans.clear()
    plan.results = tuple(expected)
    plans[call.key] = plan
