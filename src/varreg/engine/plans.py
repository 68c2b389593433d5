"""What was found out about a call, and holds for every call of the same form: training repeats itself.

The form of a call is everything that decides where it takes the batch and which rule serves it: the function, the plain arguments, and
for each tensor its shape and type and what it is, a carrier of the batch (and where), a parameter or a constant. Values are no part
of it. Where more than the form counts, or might, there is none, and the call is looked at again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varreg.engine.arguments import results
from varreg.engine.layout import Layout
from varreg.engine.marks import payload_of, put
from varreg.engine.rules import Call, Rule

Form = tuple[Any, ...]
Place = tuple[torch.Size, tuple[Any, ...]]  # shape and mark

_PLAIN = frozenset((int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))
_LAYOUT = len(Layout._fields)


def form_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], is_parameter: Callable[[Tensor], Any]
) -> tuple[Form | None, list[Tensor]]:
    """The form of a call, if it has one, and the tensors in it."""
    form: list[Any] = [func]
    tensors: list[Tensor] = []
    if not _describe(args, is_parameter, form, tensors):
        return None, tensors
    for name, value in kwargs.items():
        form.append(name)
        if not _describe((value,), is_parameter, form, tensors):
            return None, tensors
    if len(tensors) > 1 and len({id(t) for t in tensors}) != len(tensors):
        return None, tensors  # x @ x is something else than x @ y
    return tuple(form), tensors


def _describe(values: Iterable[Any], is_parameter: Callable[[Tensor], Any], form: list[Any], tensors: list[Tensor]) -> bool:
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            form += (kind, value)  # x[1] is not x[True], and 1 == True
        elif kind is Tensor or kind is nn.Parameter:  # of subclasses there may be more to know
            where: Any = payload_of(value)
            if where is not None:
                if len(where) != _LAYOUT:
                    if len(where) != _LAYOUT + 1 or value.requires_grad:
                        return False
                    where = where[:_LAYOUT]  # marked without gradients, and it has none
            elif value.requires_grad:
                if not is_parameter(value):
                    return False
                where = "parameter"
            form += (where, value.shape, value.dtype)
            tensors.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            form += (kind, len(value))
            if not _describe(value, is_parameter, form, tensors):
                return False
        elif kind is slice:
            form.append(slice)
            if not _describe((value.start, value.stop, value.step), is_parameter, form, tensors):
                return False
        else:
            return False
    return True


class Serving(NamedTuple):
    """How a rule serves a call in which parameters meet the batch. Tensors are named by their place among those of the call."""

    rule: Rule
    call: Call
    bound: dict[str, Any]
    """The arguments without tensors."""
    kept: dict[str, int]
    """What is kept for the backward pass."""
    wanted: dict[str, int]
    """Those that contributions are for."""
    places: tuple[Any, ...]
    """Where each of the results carries the batch."""

    def parameters(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[i] for i in self.wanted.values()]


class Plan(NamedTuple):
    """Where a call takes the batch, in each of its results, and the rule that serves it, if there are parameters in it."""

    places: tuple[Place | None, ...]
    """Of each result that is a tensor; None for others."""
    serving: Serving | None = None

    def fits(self, out: Any) -> bool:
        """Are the results of the shapes that the plan was made for?"""
        if isinstance(out, Tensor):
            return len(self.places) == 1 and _fits(out, self.places[0])
        outs = results(out)
        return len(outs) == len(self.places) and all(map(_fits, outs, self.places))

    def mark(self, outs: Sequence[Any]) -> None:
        """Mark results that fit."""
        for out, place in zip(outs, self.places, strict=True):
            if place is not None:
                put(out, place[1])


def _fits(out: Any, place: Place | None) -> bool:
    return (
        out.shape == place[0] if isinstance(out, Tensor) and place is not None else not isinstance(out, Tensor) and place is None
    )
