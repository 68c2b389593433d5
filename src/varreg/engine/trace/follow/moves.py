"""Functions that move data without changing values: to place the batch, they run on sample
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg.engine.trace.arguments import swap, tensors_in
from varreg.engine.trace.call import Call
from varreg.engine.trace.follow.known import Destination, Gone, Guess, follows, guess, mixing
from varreg.engine.trace.functions import (
    ADDERS,
    BY_INDEX,
    ELEMENTWISE,
    MOVERS,
    PUTS,
    RESHAPES,
    SHAPE_ONLY,
    UNARY,
    VARIADIC,
    WRITERS,
)
from varreg.engine.trace.layout import NOBODY, Layout, Lost, Place, Single, numbers, place_of

_NAMES = {
    0: ("input", "self", "tensors", "x", "a"),
    1: ("src", "other"),
    2: ("values", "value", "source"),
    3: ("source", "src"),
}
"""The names of arguments that hold data, by their position."""


def moved_data(call: Call) -> list[Any]:
    """Return the arguments of a mover that hold data."""
    if call.function in VARIADIC:
        return list(call.args)
    data = []
    positions = (0, ADDERS[call.function][0]) if call.function in ADDERS else MOVERS[call.function]
    for position in positions:
        if position < len(call.args):
            data.append(call.args[position])
        else:
            data += [call.kwargs[name] for name in _NAMES[position] if name in call.kwargs]
    return data


def index_of(call: Call) -> list[Tensor]:
    """Return the tensors among a mover's arguments that say where data goes."""
    data = {id(t) for a in moved_data(call) for t in tensors_in([a], {})}
    return [t for t in _all_tensors(call) if id(t) not in data]


def goes_by_values(call: Call) -> bool:
    """Return whether values (of an index) decide where the batch goes. Otherwise, shapes and plain
    arguments decide.
    """
    if call.function in MOVERS:
        return bool(index_of(call)) and call.function not in SHAPE_ONLY
    if call.function in ELEMENTWISE or call.function in UNARY:
        return False
    carriers = {id(x) for x, _ in call.carriers}
    return any(_is_integer(t) and id(t) not in carriers for t in call.tensors())


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


def _all_tensors(call: Call) -> list[Tensor]:
    """Return the tensors among the arguments, also those in nested tuples."""
    tensors = call.tensors()
    for a in call.args:  # x[(slice, index)]
        if isinstance(a, (list, tuple)):
            tensors += [t for b in a if isinstance(b, (list, tuple)) for t in tensors_in(b, {})]
    return tensors


@follows(*(f for f in MOVERS if f not in WRITERS))
def _move(call: Call, out: Tensor, which: int) -> Destination:
    """Place an output of a mover: by its shape, by its sample numbers, or by a guess."""
    carriers = {id(x): at for x, at in call.carriers}
    data = [t for a in moved_data(call) for t in tensors_in([a], {})]
    place: Destination | None = None
    if call.function in RESHAPES and isinstance(at := carriers.get(id(data[0])), Layout):
        place = _reshaped(at, data[0], out)
    chosen_by = [t for t in index_of(call) if id(t) in carriers]
    if place is None:
        choosers = [_chooser(call, t, carriers[id(t)], out) for t in chosen_by]
        if all(c is not None for c in choosers):
            known = [c for c in choosers if c is not None]
            return follow_numbers(call, data, carriers, out, which, known)
        place = follow_numbers(call, data, carriers, out, which)
    if not chosen_by or not isinstance(place, Place | Gone):
        return place
    # The samples choose the rows that are moved. With a mask that has the place of the data, each
    # sample chooses its own rows; for other indices, only a trial can decide.
    if isinstance(place, Place) and all(t.dtype is torch.bool for t in chosen_by):
        different = {carriers.get(id(data[0])), *(carriers[id(t)] for t in chosen_by)}
        return place if len(different) == 1 else mixing(call)
    return guess(call.carriers, out) if isinstance(place, Gone) else Guess((place,))


def follow_numbers(
    call: Call,
    data: list[Tensor],
    carriers: dict[int, Place],
    out: Tensor,
    which: int,
    choosers: Sequence[Tensor] = (),
) -> Destination:
    """Return where the samples are after their numbers were moved in place of the data.

    An element belongs to the sample that it came from, and to the samples that chose it. These must
    be the same sample.
    """
    batch = next(iter(carriers.values())).batch
    shown = {id(t): numbers(t, carriers.get(id(t))) for t in data}
    try:
        with torch.no_grad():
            args, kwargs = swap(call.args, call.kwargs, shown)
            shown_call = call.with_arguments(args, kwargs, ())
            moved, fits = _move_numbers(shown_call, shown[id(data[0])])
    except (RuntimeError, TypeError, NotImplementedError):  # the function does not accept integers
        return guess([(t, at) for t in data if (at := carriers.get(id(t)))], out)
    if not fits:
        return mixing(call)
    if not isinstance(moved, Tensor):
        moved = list(moved)[which]
    if not out.numel() and len(carriers) == 1 and len(data) == 1:
        at = next(iter(carriers.values()))  # empty, but its rows may keep their places
        if (
            not isinstance(at, Single)
            and data[0].dim() == out.dim()
            and out.shape[at.dim] == at.size
        ):
            return at
    if moved.shape != out.shape:
        return Lost(f"{call.name} depends on the values that it moves")
    for chooser in choosers:
        if bool(((moved != chooser) & (moved != NOBODY) & (chooser != NOBODY)).any()):
            return mixing(call)
        moved = torch.where(moved == NOBODY, chooser, moved)
    place = place_of(moved, batch)
    if place is not None:
        return place
    if bool((moved < 0).all()):
        return Gone(is_linear=True)
    return Lost(f"{call.name} puts rows of several samples side by side", mixed=True)


def _chooser(call: Call, index: Tensor, at: Place, out: Tensor) -> Tensor | None:
    """Return, for each element of the output, the sample whose element of the index chose it; None
    where varreg does not know how the call chooses.

    The index gets sample numbers in place of its values. The data is replaced by a range of numbers
    along the indexed dimension, so that the index returns the sample numbers themselves.
    """
    data = moved_data(call)[0]
    dim = _indexed_dim(call, index, data)
    if dim is None or index.dtype not in (torch.int64, torch.int32):
        return None
    nobody = at.batch  # the last row of the replaced data; not every function accepts -1 for it
    along = torch.arange(nobody + 1, dtype=torch.int32, device=data.device)
    along = along.view([-1 if d == dim else 1 for d in range(data.dim())])
    sizes = [nobody + 1 if d == dim else n for d, n in enumerate(data.shape)]
    owner = numbers(index, at).to(index.dtype)
    owner = owner.masked_fill(owner == NOBODY, nobody)
    args, kwargs = swap(call.args, call.kwargs, {id(data): along.expand(sizes), id(index): owner})
    chooser: Tensor = call.function(*args, **kwargs)
    return chooser.masked_fill(chooser == nobody, NOBODY) if chooser.shape == out.shape else None


def _indexed_dim(call: Call, index: Tensor, data: Tensor) -> int | None:
    """Return the dimension of the data that an index refers to; None if it is not known."""
    if call.function in BY_INDEX:
        dim = call.argument(1, "dim", call.kwargs.get("axis"))
        return dim % data.dim() if isinstance(dim, int) and data.dim() else None
    if call.function is not Tensor.__getitem__:
        return None
    items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(i is None or i is ... or type(i) in (int, slice) or _is_index(i) for i in items):
        return None
    if sum(i is index for i in items) != 1:
        return None
    taken = sum(i is not None and i is not ... for i in items)
    dim = 0
    for item in items:
        if item is index:
            return dim
        dim += data.dim() - taken if item is ... else item is not None
    return None


def _is_index(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32)


def _reshaped(at: Layout, x: Tensor, out: Tensor) -> Place | None:
    """Return where the batch is after a reshape: row-major order is `[before, batch, after]`."""
    before = math.prod(x.shape[: at.dim]) * at.outer
    passed = 1
    for dim, size in enumerate(out.shape):
        if before % passed == 0:
            outer = before // passed
            if size and size % (outer * at.batch) == 0 if at.batch else size == 0:
                return Layout(at.batch, dim, outer, size // (outer * at.batch) if at.batch else 1)
        passed *= size
    return None


def written(call: Call, places: dict[int, Place], t: Tensor, batch: int) -> Destination:
    """Return where the batch is in `t` after an operation wrote into it, or into a copy of it."""
    data = [a for a in moved_data(call) if isinstance(a, Tensor)]
    shown = {id(a): numbers(a, places.get(id(a))).contiguous() for a in data}
    args, kwargs = swap(call.args, call.kwargs, shown)
    with torch.no_grad():
        done, fits = _move_numbers(call.with_arguments(args, kwargs, ()), shown[id(t)])
    after = done if isinstance(done, Tensor) else shown[id(t)]
    place = place_of(after, batch) if fits else None
    if place is not None:
        return place
    if fits and bool((after < 0).all()):
        return Gone(is_linear=True)
    return Lost(f"{call.name} puts rows of several samples together", mixed=True)


def _move_numbers(call: Call, first: Tensor) -> tuple[Any, bool]:
    """Run a mover on sample numbers. Return its result, and whether no number was combined with
    another one. `first` is the tensor that a writer writes to.
    """
    if adds(call):
        return _added(call, first)
    args, kwargs = list(call.args), dict(call.kwargs)
    position = MOVERS[call.function][-1]
    if position and position < len(args) and not isinstance(args[position], Tensor):
        args[position] = NOBODY  # a written constant belongs to no sample
    elif "value" in kwargs and not isinstance(kwargs["value"], Tensor):
        kwargs["value"] = NOBODY
    return call.function(*args, **kwargs), True


def adds(call: Call) -> bool:
    """Return whether a writer adds to the existing values, or multiplies them."""
    if call.function in ADDERS or call.kwargs.get("reduce") is not None:
        return True
    return call.function in PUTS and bool(call.argument(3, "accumulate"))


def _added(call: Call, before: Tensor) -> tuple[Tensor, bool]:
    """Return the owners after rows were added to others, and whether only rows of the same sample
    were added.
    """
    if call.function in PUTS:
        index, values = tuple(call.argument(1, "indices")), call.argument(2, "values")
        after = before.index_put(index, values.expand_as(before[index]))
        read = after[index]
        values = values.expand_as(read)
    else:
        # `scatter` with a `reduce`, too
        at, write, read_back = ADDERS.get(call.function, ADDERS[torch.scatter_add])
        dim, index = call.argument(1, "dim"), call.argument(2, "index")
        values = call.argument(at, "source", call.kwargs.get("src"))
        if not isinstance(values, Tensor):  # a constant belongs to no sample
            values = torch.full_like(index, NOBODY, dtype=before.dtype)
        if write is torch.scatter:
            values = values[tuple(slice(n) for n in index.shape)]
        after = write(before, dim, index, values)
        read = read_back(after, dim, index)
    alone = (before == NOBODY) | (after == NOBODY) | (before == after)
    fits = bool(((read == values) | (values == NOBODY)).all()) and bool(alone.all())
    return torch.where(after == NOBODY, before, after), fits
