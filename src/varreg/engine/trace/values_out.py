"""Values of the batch that leave torch, and may come back as constants."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from varreg import _torch
from varreg.engine.marks import mark_constant
from varreg.engine.trace.arguments import results, tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.functions import ELEMENTWISE, is_sized_by_values, tells_shapes_only
from varreg.engine.trace.trace import Trace
from varreg.thresholds import SIZE_OF_BATCH

_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


def lets_values_out(trace: Trace, call: Call, out: Any) -> bool:
    """Return whether a result tells Python something of the batch's values: it is no tensor, or a
    tensor of a size that values decide.
    """
    if not call.depends_on_batch or is_size_of_sequences(trace, call):
        return False
    types = {t.dtype for t in tensors_in(call.args[1:], {})}
    if is_sized_by_values(call.function, call.args, types):
        return True
    if tells_shapes_only(call.function) or isinstance(out, torch.Size):
        return False
    return any(not isinstance(t, (Tensor, type(None))) for t in results(out))


def is_size_of_sequences(trace: Trace, call: Call) -> bool:
    """Return whether it is the number of packed sequences that torch's own recurrent layers ask
    for.
    """
    if call.carriers:
        return False
    modules = trace.observer.forward.modules_around([])
    return bool(modules) and type(modules[-1]) in _RECURRENT


def mark_constants(out: Any) -> Any:
    """Mark what was seen to be made of constants alone, and return it."""
    for t in results(out):
        if isinstance(t, Tensor) and not t.requires_grad:
            mark_constant(t)
    return out


def may_count_samples(trace: Trace, call: Call) -> bool:
    """Return whether a call gives elements of the batch a constant that could have been made of the
    number of samples: such a number, or a tensor with as many rows. A trial tells (`alone.py`).
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
    """Return whether a number could have been made of the number of samples: it is that, a multiple
    of it, its root, its logarithm, or one of their inverses.
    """
    if type(value) not in (int, float) or batch < 2 or not value or not math.isfinite(value):
        return False
    n = abs(value)
    if n >= batch and float(n % batch) == 0.0:
        return True
    sizes = (1 / batch, math.sqrt(batch), 1 / math.sqrt(batch), math.log(batch))
    return any(math.isclose(n, size, rel_tol=SIZE_OF_BATCH) for size in sizes)
