"""The arguments of a torch function: finding, replacing, and keeping the tensors in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset((int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format))


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [b for b in a if isinstance(b, Tensor)]
    return found


class ValuesMatter(Exception):  # noqa: N818
    """An argument of which more has to be known than can be said of it here."""


def form(values: Iterable[Any], numbered: Sequence[Tensor]) -> tuple[Any, ...]:
    """Arguments without the values in their tensors: two calls of the same form differ in these alone.

    Of a tensor it says the shape, and which of the `numbered` it is: the same one may be given twice. Of a number it says the type, since
    `x[1]` is not `x[True]`.
    """
    found: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind in _PLAIN:
            found += (kind, value)
        elif isinstance(value, Tensor):
            found += (value.shape, next((i for i, t in enumerate(numbered) if t is value), None))
        elif kind in (tuple, list, torch.Size):
            found += (kind, form(value, numbered))
        elif kind is slice:
            found += (slice, form((value.start, value.stop, value.step), numbered))
        else:
            raise ValuesMatter
    return tuple(found)


def replaced(value: Any, new: dict[int, Any]) -> Any:
    """An argument with some tensors, named by their id, replaced; also those in a list or tuple."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    return type(value)([replaced(v, new) for v in value]) if type(value) in (list, tuple) else value


def swap(args: Sequence[Any], kwargs: dict[str, Any], new: dict[int, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [replaced(a, new) for a in args], {k: replaced(v, new) for k, v in kwargs.items()} if kwargs else kwargs


def flatten(bound: dict[str, Any]) -> dict[str, Tensor]:
    """Tensor arguments by name; the elements of a list as `name.0`, `name.1`, …"""
    flat = {}
    for name, value in bound.items():
        if isinstance(value, Tensor):
            flat[name] = value
        elif isinstance(value, (list, tuple)):
            flat |= {f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, Tensor)}
    return flat


def without_tensors(bound: dict[str, Any]) -> dict[str, Any]:
    """The arguments with None for each tensor, so that keeping them keeps no memory."""
    return {
        name: None
        if isinstance(v, Tensor)
        else [None if isinstance(u, Tensor) else u for u in v]
        if isinstance(v, (list, tuple))
        else v
        for name, v in bound.items()
    }


def refill(bound: dict[str, Any], saved: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments again, with the tensors that were saved, and None for those that were not."""
    full = dict(bound)
    for name, t in saved.items():
        base, dot, index = name.partition(".")
        if dot:
            full[base] = [t if i == int(index) else v for i, v in enumerate(full[base])]
        else:
            full[base] = t
    return full
