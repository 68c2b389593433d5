"""Find where the batch is in the outputs of a torch function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varreg.engine.trace.call import Call
from varreg.engine.trace.follow import contractions, layers, moves
from varreg.engine.trace.follow.known import KNOWN, Destination, Gone, Guess, guess
from varreg.engine.trace.follow.moves import index_of, moved_data, written
from varreg.engine.trace.functions import ELEMENTWISE, MOVERS, SHAPE_ONLY, UNARY, WRITERS
from varreg.engine.trace.layout import Layout, Single, only_sample

__all__ = ["Destination", "Gone", "Guess", "follow", "goes_by_values", "guess", "index_of"]
__all__ += ["is_known", "moved_data", "written"]
__all__ += ["contractions", "layers", "moves"]  # imported for the functions that they register


def follow(call: Call, out: Tensor, which: int) -> Destination:
    """Return where the batch is in `out`, the result number `which` of a call."""
    places = {at for _, at in call.carriers}
    if all(at.batch == 1 for at in places):
        return only_sample(out)
    if all(at.batch == 0 for at in places) and 0 in out.shape:
        return Layout(0, list(out.shape).index(0))
    if len(places) == 1 and call.function not in WRITERS:
        (place,) = places
        if isinstance(place, Single):
            return place  # made of one sample and constants: the output belongs to that sample
    known = KNOWN.get(call.function)
    return guess(call.carriers, out) if known is None else known(call, out, which)


def is_known(function: Any) -> bool:
    """Return whether the place of the output of a call is derived exactly, and not guessed."""
    return function in KNOWN


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
