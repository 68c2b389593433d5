"""Calls through which values of the batch leave torch; the values may return as constants."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from varreg import _torch
from varreg.engine.marks import mark_constant, mark_of
from varreg.engine.trace.arguments import results, tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.functions import (
    ELEMENTWISE,
    is_sized_by_values,
    name_of,
    takes_numbers,
    tells_shapes_only,
)
from varreg.engine.trace.layout import Lost, Place, Summed
from varreg.engine.trace.trace import Trace
from varreg.errors import VarregError
from varreg.thresholds import SIZE_OF_BATCH

_POSITIONS = (torch.int64, torch.int32, torch.int16, torch.int8)
_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


def lets_values_out(trace: Trace, call: Call, out: Any) -> bool:
    """Return whether a result lets Python read values of the batch: it is not a tensor, or values
    decide its size.
    """
    if not call.depends_on_batch or is_size_of_sequences(trace, call):
        return False
    types = {t.dtype for t in tensors_in(call.args[1:], {})}
    if is_sized_by_values(call.function, call.args, types) or _reads_number(call):
        return True
    if tells_shapes_only(call.function) or isinstance(out, torch.Size):
        return False
    return any(
        t.layout is not torch.strided if isinstance(t, Tensor) else t is not None
        for t in results(out)
    )


def _reads_number(call: Call) -> bool:
    """Return whether a whole number of the batch may be read as a size or a position: torch accepts
    a tensor without dimensions as a number.
    """
    if not takes_numbers(call.function):
        return False
    first = call.args[0] if call.args else None
    return any(
        t is not first and not t.dim() and not (t.is_floating_point() or t.is_complex())
        for t in (*(t for t, _ in call.carriers), *(t for t, _ in call.lost), *call.summed)
    )


def read_positions(trace: Trace, call: Call) -> None:
    """Let whole numbers of the batch out that are positions in a parameter or in the batch, such as
    the number of an expert in `weight[e]`. Torch reads a tensor without dimensions there as a
    number, as `item()` does. For this call, it is a constant; a trial of the forward decides.
    """
    if call.function is not Tensor.__getitem__:
        return
    if not (call.parameters or call.carriers or isinstance(call.args[0], nn.Parameter)):
        return
    rest = []
    for t, at in call.lost:
        if t is call.args[0] or t.dim() or t.dtype not in _POSITIONS:
            rest.append((t, at))
        else:
            trace.escape(call.function, int(t))
    call.lost = rest


def note_failure(trace: Trace, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
    """Note an error that values of the batch may have caused: the model's code may catch it, and
    take another branch.
    """
    if not isinstance(error, VarregError):
        marks = (mark_of(t) for t in tensors_in(args, kwargs))
        if any(isinstance(at, Place | Lost | Summed) for at in marks):
            trace.escape(f"an error in {name_of(func)}")


def run_callback(trace: Trace, call: Call) -> Any:
    """Run, once, a function that passes the elements of the batch to a Python function. Mark its
    result, and return it.
    """
    trace.escape(call.function)
    out, places = call.run(), [at for _, at in call.carriers]
    is_alike = len(places) == len(call.tensors()) and all(at == places[0] for at in places)
    trace.mark(out, places[0] if is_alike else Lost(f"{call.name} calls a Python function"))
    return out


def is_size_of_sequences(trace: Trace, call: Call) -> bool:
    """Return whether the value is the number of packed sequences, read by a recurrent layer of
    torch.
    """
    if call.carriers:
        return False
    modules = trace.observer.forward.modules_around([])
    return bool(modules) and type(modules[-1]) in _RECURRENT


def mark_constants(out: Any) -> Any:
    """Mark a result that is made of constants alone, and return it."""
    for t in results(out):
        if isinstance(t, Tensor) and not t.requires_grad:
            mark_constant(t)
    return out


def may_count_samples(trace: Trace, call: Call) -> bool:
    """Return whether a call combines the batch with a constant that could have been made from the
    number of samples: such a number, or a tensor with as many rows. A trial decides
    (`trial/alone.py`).
    """
    if call.function not in ELEMENTWISE or _torch.is_transform_active():
        return False
    carriers = {id(t) for t, _ in call.carriers}
    for a in (*call.args, *call.kwargs.values()):
        if not isinstance(a, Tensor):
            found = _looks_like_size(a, trace.batch)
        elif id(a) in carriers or a.requires_grad or a.is_meta:
            found = False
        elif a.numel() == 1:
            found = a.is_cpu and _looks_like_size(a.item(), trace.batch)
        else:
            found = trace.batch in a.shape
        if found:
            return True
    return False


def _looks_like_size(value: Any, batch: int) -> bool:
    """Return whether a number could have been made from the number of samples: it is this number, a
    multiple of it, its root, its logarithm, or the inverse of one of them.
    """
    if type(value) not in (int, float) or batch < 2 or not value or not math.isfinite(value):
        return False
    n = abs(value)
    if n >= batch and float(n % batch) == 0.0:
        return True
    sizes = (1 / batch, math.sqrt(batch), 1 / math.sqrt(batch), math.log(batch))
    return any(math.isclose(n, size, rel_tol=SIZE_OF_BATCH) for size in sizes)
