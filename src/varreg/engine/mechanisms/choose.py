"""Choose the mechanism that measures a use of parameters, or refuse the use with a reason."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from varreg.engine.mechanisms import by_repetition, by_rule, by_spread
from varreg.engine.rules import PACKED, RULES, STACKED, STACKED_PACKED
from varreg.engine.trace.call import Call
from varreg.engine.trace.decide import place_result, refuse_grouped
from varreg.engine.trace.functions import FILLS, SELECTS, WRITERS, without_override_check
from varreg.engine.trace.layout import Ragged
from varreg.engine.trace.packed import is_packed
from varreg.engine.trace.results import mark_derived
from varreg.engine.trace.trace import Trace
from varreg.errors import VarregError

if TYPE_CHECKING:
    from varreg.engine.trace.tracer import Tracer


def measure(tracer: Tracer, call: Call) -> Any:
    """Run a call that uses parameters on the batch, by the first mechanism that can measure it, and
    return its result. The order is: the functions inside of it, each by itself; spreading; its
    rule; repetition.
    """
    trace = tracer.trace
    packed = is_packed(call.function, call.args)
    decomposed = _decompose(call, packed)
    if decomposed is not None and call.out is None:
        with tracer:  # each function inside of it is measured by itself
            return decomposed(*call.args, **call.kwargs)
    if not torch.is_grad_enabled():
        return _run_without_gradients(trace, call)
    if _is_reordered(call):
        trace.escape(call.function)
        out = call.run()
        mark_derived(trace, out)
        return out
    if call.out is not None:
        return call.run()  # torch raises: `out=` supports no gradient
    _refuse_unmeasurable(trace, call)
    if _fills_with_parameter(call):
        x, mask, value = call.args[:3]
        return tracer.run_new(torch.where, (mask, value, x), {})
    if by_spread.serves(call):
        return by_spread.measure(trace, call)
    aligned = by_spread.align(trace, call)
    if aligned is not None:
        return tracer.run_new(call.function, aligned.args, aligned.kwargs)
    rule = PACKED[call.function] if packed else RULES.get(call.function)
    if rule is not None:
        out = by_rule.measure(trace, tracer.plans, call, rule)
        if out is not None:
            return out
    if packed and trace.batch > 1:
        trace.refuse(
            call, "varreg cannot tell which sample each row of the packed sequence belongs to"
        )
    return by_repetition.measure(trace, call)


def _run_without_gradients(trace: Trace, call: Call) -> Any:
    """Run a use in a block without gradients: a re-entrant checkpoint will run it again."""
    trace.expect(call.parameters)
    out = call.run()
    lost = call.lost[0][1] if call.lost else None
    trace.mark_each(out, lambda t, i: lost or place_result(trace, call, t, i))
    return out


def _refuse_unmeasurable(trace: Trace, call: Call) -> None:
    """Refuse uses that no mechanism can measure."""
    refuse_grouped(trace, call)
    if call.lost or call.summed:
        why = call.lost[0][1].why if call.lost else "it was summed up"
        trace.refuse(call, f"the batch cannot be followed to it: {why}")
    if call.function in WRITERS:
        trace.refuse(
            call,
            "values made of parameters are written into a tensor; build it with torch.cat or "
            "torch.where",
        )
    if call.args and any(call.args[0] is t for t in call.parameters) and call.is_in_place:
        trace.refuse(
            call, "a tensor made of parameters is changed in place; write it as a new tensor"
        )
    if any(isinstance(at, Ragged) and not at.is_whole for _, at in call.carriers):
        trace.refuse(call, "some rows have not been assigned to a sample")
    if len({at.batch for _, at in call.carriers}) > 1:
        trace.refuse(call, "it combines batches of different sizes")
    if call.function in (F.embedding, F.embedding_bag):
        _refuse_lookup(trace, call)


def _refuse_lookup(trace: Trace, call: Call) -> None:
    """Refuse lookups whose gradient is not the dense sum of the samples' contributions."""
    options = RULES[call.function].bind(call.args, call.kwargs) or {}
    for option in ("sparse", "scale_grad_by_freq"):
        if options.get(option):
            raise VarregError(
                f"varreg: in {trace.observer.forward.path()}, an embedding with {option}=True is "
                f"not supported; set it to False where {trace.names(call.parameters)} is looked up."
            )


def _fills_with_parameter(call: Call) -> bool:
    """Return whether `masked_fill` gets a parameter in place of a number."""
    if call.function not in FILLS or not call.args[2:]:
        return False
    first = call.parameters[0]
    return call.args[2] is first and not first.dim()


def _is_reordered(call: Call) -> bool:
    """Return whether a call puts all rows of a tensor made of parameters into an order that depends
    on the batch, such as the rows of a learned initial state for packed sequences.
    """
    if call.function not in SELECTS or len(call.args) != 3 or call.carriers or call.summed:
        return False
    t, dim, index = call.args
    if not (isinstance(t, Tensor) and len(call.lost) == 1 and call.lost[0][0] is index):
        return False
    return torch.equal(index.sort().values, torch.arange(t.shape[dim], device=index.device))


# ---- functions that are made of others -----------------------------------------------------------

_python: dict[Any, Callable[..., Any] | None] = {}


def _decompose(call: Call, packed: bool) -> Callable[..., Any] | None:
    """Return a function that computes the same by calls of other functions; None if there is none,
    or if it is not needed.
    """
    if packed or call.function in STACKED:
        layers, dropout, training = call.args[5:8] if packed else call.args[4:7]
        if layers > 1 and dropout > 0 and training:  # a rule cannot repeat the dropout
            stacked: Callable[..., Any] = (STACKED_PACKED if packed else STACKED)[call.function]
            return stacked
    if packed or call.function in RULES:
        return None
    if call.function not in _python:
        _python[call.function] = _written_in_python(call.function)
    return _python[call.function]


def _written_in_python(function: Any) -> Callable[..., Any] | None:
    """Return the body of a torch function that is written in Python; None for others."""
    if isinstance(function, FunctionType) and any(
        "has_torch_function" in name for name in function.__code__.co_names
    ):
        return without_override_check(function)
    return None
