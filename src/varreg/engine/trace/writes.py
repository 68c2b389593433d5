"""Calls that write into a tensor: find its place afterwards, and update the marks of tensors that
share its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varreg.engine.marks import mark, mark_of
from varreg.engine.trace.arguments import tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.follow import Gone, Guess, guess, index_of, moved_data, written
from varreg.engine.trace.functions import RESHAPERS, WRITERS, written_arguments
from varreg.engine.trace.layout import (
    Layout,
    Lost,
    Place,
    Ragged,
    Summed,
    Where,
    numbers,
    only_sample,
    place_of,
)
from varreg.engine.trace.trace import WRITTEN, Trace, memory_of
from varreg.engine.trace.trial import Verdict


def note_alias(trace: Trace, t: Tensor) -> None:
    """Note a tensor that is detached: a write to the detached tensor also changes this one."""
    trace.aliases.setdefault(memory_of(t), []).append(t)


# ---- writers: `x[i] = y`, `index_add`, `copy_`, … ------------------------------------------------


def write(trace: Trace, call: Call) -> Any:
    """Run a function that writes into its first argument, or into a copy of it, and mark the
    written tensor. Return the result of the function.
    """
    t = moved_data(call)[0]
    place = _place_written(trace, call, t)
    out = call.run()
    if isinstance(out, Tensor) and out is not t:  # `index_add` leaves `t` as it is
        trace.mark_each(out, lambda *_: place)
        return out
    is_reshaper = call.function in RESHAPERS
    before = mark_of(t)
    if isinstance(before, Place) and before != place and not is_reshaper:
        trace.rewritten[memory_of(t)] = t  # earlier views of it are out of date
    trace.mark_or_refuse(t, place)
    if not is_reshaper and isinstance(place, Place | Lost):
        _mark_aliases(trace, t, place)
    return out


def _place_written(trace: Trace, call: Call, t: Tensor) -> Where:
    """Return where the written tensor will carry the batch."""
    data = [a for a in moved_data(call) if isinstance(a, Tensor)]
    index = {id(a) for a in index_of(call)}
    if any(a is x for a in data for x, _ in call.lost) or call.summed:
        why = call.lost[0][1].why if call.lost else "a sum over the batch"
        return Lost(f"{call.name} writes the result of: {why}", mixed=True)
    if any(id(x) in index for x, _ in call.lost):
        trace.escape(call.function)
    places = {id(x): at for x, at in call.carriers if id(x) not in index}
    choosers = [(x, at) for x, at in call.carriers if id(x) in index] if trace.batch > 1 else []
    target = places.get(id(t))
    if not choosers and _keeps_owners(trace, call, t, places):
        assert target is not None
        return target
    writes_constant = not any(id(a) in places for a in data[1:])
    if target is not None and writes_constant and not choosers and call.function not in RESHAPERS:
        return target  # a constant does not move samples
    if not places and call.carriers:  # samples choose where a constant goes
        return _place_chosen(trace, call, t)
    destination = written(call, places, t, trace.batch) if places else None
    if isinstance(destination, Gone) or destination is None:
        destination = target or Lost(f"{call.name} into a tensor of shape {tuple(t.shape)}")
    assert not isinstance(destination, Guess)
    if isinstance(destination, Place) and choosers:
        return _check_choosers(trace, call, destination, choosers)
    return destination


def _place_chosen(trace: Trace, call: Call, t: Tensor) -> Place | Lost:
    """Return where a constant carries the batch after a write at positions that the samples choose,
    as in `zeros.scatter_(1, index, 1.0)`. A trial decides, each time.
    """
    if trace.batch == 1:
        return only_sample(t)
    for place in guess(call.carriers, t).places:
        if trace.verdicts.of_values(call, place, 0) is Verdict.APART:
            return place
    return Lost(f"{call.name} into a tensor of shape {tuple(t.shape)}", mixed=True)


def _check_choosers(
    trace: Trace, call: Call, place: Place, choosers: list[tuple[Tensor, Place]]
) -> Place | Lost:
    """Return the place, if each sample chooses positions for its own rows only."""
    if all(x.dtype is torch.bool for x, _ in choosers):  # each sample chooses its own rows
        is_same = all(at == place for _, at in choosers)
        return place if is_same else Lost(f"{call.name} mixes samples", mixed=True)
    # indices are values: only a trial shows whether each sample writes to its own rows
    if trace.verdicts.of_values(call, place, 0) is not Verdict.APART:
        return Lost(f"{call.name} mixes samples, or changes their order", mixed=True)
    return place


def _keeps_owners(trace: Trace, call: Call, t: Tensor, places: dict[int, Place]) -> bool:
    """Return whether each row replaces a row of the same sample. This check makes no copy."""
    target, value = places.get(id(t)), call.args[-1] if len(call.args) > 1 else None
    is_plain = call.function is Tensor.__setitem__ and not tensors_in([call.args[1]], {})
    if not (isinstance(value, Tensor) and (is_plain or call.function is Tensor.copy_)):
        return False
    at = places.get(id(value))
    if not isinstance(target, Layout | Ragged) or not isinstance(at, Layout | Ragged):
        return False
    # the same index, applied to sample numbers, shows the owners of the written rows
    region = numbers(t, target)[call.args[1] if is_plain else ...]
    place = place_of(region, trace.batch) if region._is_view() else None
    if not isinstance(place, Layout | Ragged) or region.dim() < value.dim():
        return False
    return place == at._replace(dim=at.dim + region.dim() - value.dim())


# ---- tensors that share memory with a written tensor ---------------------------------------------


def mark_written(trace: Trace, call: Call) -> None:
    """Mark the tensors that share memory with a tensor that a call wrote into, in place or by
    `out=`.
    """
    targets: list[Tensor] = tensors_in((), {"out": call.out})
    if call.args and isinstance(call.args[0], Tensor) and call.is_in_place:
        targets = [call.args[0], *targets]
    for t in targets:
        where = mark_of(t)
        if isinstance(where, Summed):
            where = Lost("a sum over the batch was written into a tensor", mixed=True)
        if isinstance(where, Place | Lost) and call.function not in RESHAPERS:
            _mark_aliases(trace, t, where)
    # the schema of an operator from outside of torch says which arguments it writes to, not what it
    # writes
    for i in written_arguments(call.function):
        if i < len(call.args) and isinstance(call.args[i], Tensor):
            lost = Lost(f"{call.name} writes into a tensor", mixed=True)
            mark(call.args[i], lost)
            trace.refuse_later(call.args[i], lost)


def _mark_aliases(trace: Trace, t: Tensor, place: Place | Lost) -> None:
    """Mark the base of a written view, and the tensors that share memory by `detach()`: the write
    changed them, too.
    """
    if t._is_view() and t._base is not None:
        _mark_base(trace, t, place)
    for other in trace.aliases.get(memory_of(t), ()):
        if other is not t:
            is_same = other.shape == t.shape and other.stride() == t.stride()
            lost = Lost(WRITTEN, mixed=True)
            trace.mark_or_refuse(other, place if is_same else lost)


def _mark_base(trace: Trace, t: Tensor, place: Place | Lost) -> None:
    """Mark the base of a view after a write through the view."""
    base: Any = t._base
    before = mark_of(base)
    if isinstance(before, Lost) or isinstance(place, Lost) or not _counts_alike(t, base):
        is_lost = isinstance(place, Lost)
        trace.mark_or_refuse(base, place if is_lost else Lost("a view of a tensor was written to"))
        return
    # write to the sample numbers of the base as the call wrote to its data, with the same strides
    values = numbers(base, before if isinstance(before, Place) else None)
    owners = values.new_empty_strided(base.shape, base.stride()).copy_(values)
    offset = t.storage_offset() - base.storage_offset()
    owners.as_strided(t.shape, t.stride(), offset).copy_(numbers(t, place))
    at = place_of(owners, trace.batch)
    trace.mark_or_refuse(base, at or Lost("a view of a tensor was written to", mixed=True))


def _counts_alike(t: Tensor, base: Tensor) -> bool:
    """Return whether the strides of a view count whole elements of its base, each element once.

    The strides of `z.real` count half elements; those of an expanded view count elements
    repeatedly.
    """
    is_expanded = any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))
    return base.dtype == t.dtype and not is_expanded


# ---- parameters that are written to --------------------------------------------------------------


def writes_parameter(trace: Trace, call: Call) -> bool:
    """Return whether a call writes into a parameter, as in a codebook that is updated from the
    batch.
    """
    if not call.args or not isinstance(call.args[0], Tensor):
        return False
    if not (call.function in WRITERS or call.is_in_place):
        return False
    shared = (call.args[0], *trace.aliases.get(memory_of(call.args[0]), ()))
    return any(trace.observer.parameters.ledger(t) is not None for t in shared)


def lose_written(trace: Trace, call: Call) -> Any:
    """Run a call that writes values of the batch into a parameter. Mark the parameter as lost."""
    out = call.run()
    lost = Lost("values of the batch were written into a parameter", mixed=True)
    for t in (call.args[0], *trace.aliases.get(memory_of(call.args[0]), ())):
        mark(t, lost)
    return out
