"""Sort the tensors of a call by their marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from varreg.engine.marks import DERIVED, Derived, is_constant, is_unseen, mark_of
from varreg.engine.trace.arguments import tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.functions import CREATORS, SHAPE_ONLY
from varreg.engine.trace.layout import Layout, Lost, Place, Summed, Where
from varreg.engine.trace.packed import sizes_in
from varreg.engine.trace.trace import UNKNOWN, UNKNOWN_CONSTANT, WRITTEN, Trace, memory_of
from varreg.engine.trace.unseen import candidates_for, find_place


def sort_tensors(trace: Trace, call: Call) -> None:
    """Fill the lists of a call: carriers, parameters, lost, summed."""
    sizes = sizes_in(call.function, call.args)
    for t in _read_tensors(call):
        if type(t) is not Tensor and type(t).__name__ == "FakeTensor":
            continue  # a compiler reads shapes now, and runs the compiled code later
        if t is sizes:
            continue
        where = _where(trace, t)
        if isinstance(where, Place):
            if not any(t is x for x, _ in call.carriers):
                call.carriers.append((t, where))
        elif isinstance(where, Lost):
            call.lost.append((t, where))
        elif isinstance(where, Summed):
            call.summed.append(t)
        elif where is DERIVED and t.requires_grad:
            call.parameters.append(t)


def _read_tensors(call: Call) -> Sequence[Tensor]:
    """Return the tensors whose values the function reads."""
    if call.function in CREATORS:  # they read no values of the first argument
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("input", "self")}
        return tensors_in(call.args[1:], kwargs)
    if call.function in SHAPE_ONLY and call.args:
        return call.args[:1]
    return call.tensors()


def _where(trace: Trace, t: Tensor) -> Where | Derived | None:
    """Return the mark of a tensor; find a place for a tensor whose origin the tracer did not
    see.
    """
    where = mark_of(t)
    if trace.rewritten and id(t) not in trace.fresh and memory_of(t) in trace.rewritten:
        where = Lost(WRITTEN, mixed=True)
    if where is None and not t.requires_grad:
        _note_unknown(trace, t)
    elif where is None:
        if trace.observer.parameters.ledger(t):
            where = DERIVED
        elif t.grad_fn is not None:
            where = find_place(trace, t, candidates_for(t, trace.batch))
    elif isinstance(where, Layout) and is_unseen(t):
        where = find_place(trace, t, [where])
    return where


def _note_unknown(trace: Trace, t: Tensor) -> None:
    """Note a constant of unknown origin: an attribute of the model, or a tensor that a scripted
    function, another thread or a C++ extension may have made from the batch. A trial of the whole
    forward decides.
    """
    if trace.batch <= 1 or is_constant(t) or trace.observer.parameters.is_buffer(t):
        return
    if any(t is x for x in trace.observer.forward.inputs):  # an input that does not carry the batch
        return
    trace.escape(UNKNOWN if trace.batch in t.shape else UNKNOWN_CONSTANT)


def hides_samples(args: Sequence[Any]) -> bool:
    """Return whether values of the batch are in slices or nested lists among the arguments."""
    for a in args:
        if isinstance(a, (slice, list, tuple)):
            for t in _hidden_in(a, depth=0):
                if isinstance(mark_of(t), Place | Lost | Summed):
                    return True
    return False


def _hidden_in(a: Any, depth: int) -> list[Tensor]:
    """Return tensors in slices, and in lists below the first level, which `sort_tensors` does not
    search.
    """
    if isinstance(a, Tensor):
        return [a] if depth > 1 else []
    if isinstance(a, slice):
        return [b for b in (a.start, a.stop, a.step) if isinstance(b, Tensor)]
    if isinstance(a, (list, tuple)):
        return [t for b in a for t in _hidden_in(b, depth + 1)]
    return []
