"""Known functions: where their outputs carry the batch follows exactly from their arguments.

The decorator `@follows(...)` lists the functions: elementwise ones here, functions that move data
in `moves.py`, reductions and products in `contractions.py`, layers in `layers.py`. The sets of
functions that these files name, such as ELEMENTWISE and MOVERS, are in `trace/functions.py`.

A function that only moves data runs on sample numbers in place of the data, with all its other
arguments: each sample is where its number ends up. A reduction runs on a small tensor in which only
the batch's dimension has its size. So torch itself interprets `dim`, `axis`, positions and
keywords.

`trace/decide.py` looks a function up in `KNOWN`. A function that is not there gets a `Guess`, and a
trial decides (`trial/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varreg.engine.trace.call import Call, Carriers
from varreg.engine.trace.functions import ELEMENTWISE, SUMS, UNARY, named
from varreg.engine.trace.layout import Lost, Place, Single


class Guess(NamedTuple):
    """Possible places of the batch in an output. A trial decides; if all fail, the output has no
    batch.
    """

    places: tuple[Place, ...]


class Gone(NamedTuple):
    """The batch is in no dimension of the output."""

    is_linear: bool
    """True: the output is a sum over samples, by the definition of the function."""


Destination = Place | Lost | Guess | Gone
"""Where the batch is in an output."""
Follow = Callable[[Call, Tensor, int], Destination]
"""A function of the call, one of its outputs, and the position of that output."""
KNOWN: dict[Any, Follow] = {}


def follows(*functions: Any) -> Callable[[Follow], Follow]:
    """Register the decorated function for torch functions whose outputs it can place."""

    def add(follow: Follow) -> Follow:
        KNOWN.update(dict.fromkeys(functions, follow))
        return follow

    return add


def is_known(function: Any) -> bool:
    """Return whether the place of the output of a function is derived exactly, and not guessed."""
    return function in KNOWN


def guess(carriers: Carriers, out: Tensor) -> Guess:
    """Return the places that the sizes allow: first the dimension of the argument, then any
    other.
    """
    places: dict[Place, None] = {}
    for x, at in carriers:
        if isinstance(at, Single):
            places[at] = None
            continue
        dims = [d for d, n in enumerate(out.shape) if n == at.size]
        likely = [at.dim] if out.dim() == x.dim() else [0, out.dim() - x.dim() + at.dim]
        for d in sorted(dims, key=lambda d: d not in likely):
            places[at._replace(dim=d)] = None
    return Guess(tuple(places))


def mixing(call: Call) -> Lost:
    """Return the mark of an output that combines samples: lost."""
    return Lost(f"{call.name} combines samples with each other", mixed=True)


@follows(*ELEMENTWISE, *UNARY)
def follow_elements(call: Call, out: Tensor, which: int) -> Destination:
    """Place the output of a function that works on one element after the other."""
    if call.function is torch.where and len(call.args) + len(call.kwargs) == 1:
        # it returns the positions of True: their number may equal the batch by chance
        return Gone(is_linear=False)
    return agreed(call, (_broadcast(at, x, out) for x, at in call.carriers))


def _broadcast(at: Place, x: Tensor, out: Tensor) -> Place | None:
    """Return where `x` has its batch after it was broadcast to `out`."""
    if isinstance(at, Single):
        return at
    dim = at.dim + out.dim() - x.dim()
    return at._replace(dim=dim) if 0 <= dim < out.dim() and out.shape[dim] == at.size else None


def agreed(call: Call, places: Iterable[Place | None]) -> Place | Lost | Gone:
    """Return the one place that all arguments lead to."""
    different = list(dict.fromkeys(places))
    if None in different:
        return Gone(is_linear=False)
    if len(different) == 1:
        return different[0]  # type: ignore[return-value]
    if call.function in SUMS and all(isinstance(at, Single) for at in different):
        return Gone(is_linear=True)  # the losses of several samples are added up
    return Lost(f"{call.name} combines rows of different samples", mixed=True)


@follows(*named("as_strided", "as_strided_scatter"))
def _by_memory(call: Call, out: Tensor, which: int) -> Destination:
    """Place a result whose rows depend on how the argument lies in memory."""
    return Lost(f"{call.name} reads memory without regard to rows", mixed=True)
