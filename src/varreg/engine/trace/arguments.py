"""Find, replace and keep the tensors in the arguments of a torch function."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from types import CellType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn

from varreg._torch import tree_leaves, tree_map
from varreg.thresholds import MOST_OBJECTS


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, and in lists and tuples among them."""
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [b for b in a if isinstance(b, Tensor)]
    return found


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a structure of any kind, in order: sequences, mappings, dataclasses."""
    tensors: list[Tensor] = []
    rest = [tree]  # a stack: the last entry comes next
    while rest:
        value = rest.pop()
        kind = type(value)
        if isinstance(value, Tensor):
            tensors.append(value)
        elif kind is tuple or kind is list:
            rest += value[::-1]
        elif kind is dict:
            rest += reversed(value.values())
        elif value is not None and not isinstance(value, (str, int, float)):
            parts = _parts(value)
            if parts is None:
                tensors += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
            else:
                rest += reversed(parts.values())
    return tensors


def hidden_tensors(root: Any, known: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the tensors anywhere in a value, without the `known` ones: in containers, in
    attributes of objects, in closures, and in the frames of generators. The search ends after a
    limited number of objects.
    """
    seen, found, rest = {id(t) for t in known}, [], [root]
    while rest and len(seen) < MOST_OBJECTS:
        value = rest.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        else:
            rest += _held(value)
    return found


_PLAIN = (str, bytes, int, float, complex, type(None), type, nn.Module, ModuleType)


def _held(value: Any) -> Sequence[Any]:
    """Return the objects that an object of any kind holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, GeneratorType):
        return [] if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    if isinstance(value, FunctionType):
        return [cell for cell in map(content, value.__closure__ or ()) if cell is not None]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", "builtins", "varreg"):
        return []
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [n for s in slots for n in ((s,) if isinstance(s, str) else s) if n != "__dict__"]
    return [*(getattr(value, n, None) for n in names), *getattr(value, "__dict__", {}).values()]


def content(cell: CellType) -> Any:
    """Return the content of a cell of a closure; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _parts(tree: Any) -> dict[Any, Any] | None:
    """Return the values in a mapping, dataclass or plain object, by name; None for anything
    else.
    """
    if isinstance(tree, Mapping):
        return dict(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: getattr(tree, f.name, None) for f in dataclasses.fields(tree)}
    if isinstance(tree, (list, tuple, set, frozenset)):
        return dict(enumerate(tree))
    if type(tree).__module__ == "builtins" or isinstance(tree, (nn.Module, type)):
        return None
    if type(tree).__module__.partition(".")[0] in ("torch", "numpy") or callable(tree):
        return None
    held = getattr(tree, "__dict__", None)
    found = dict(held) if isinstance(held, dict) else {}
    found |= {
        n: getattr(tree, n, None)
        for n in getattr(type(tree), "__slots__", ())
        if isinstance(n, str)
    }
    plain = (Tensor, list, tuple, dict)  # other attributes of a user's object are not searched
    return {n: v for n, v in found.items() if isinstance(v, plain)} or None


def replace_tensors(tree: Any, new: dict[int, Tensor]) -> Any:
    """Return a structure with some tensors, named by their id, replaced; the original stays."""
    if isinstance(tree, Tensor):
        return new.get(id(tree), tree)
    if type(tree) in (tuple, list):
        return type(tree)([replace_tensors(v, new) for v in tree])
    if type(tree) is dict:
        return {k: replace_tensors(v, new) for k, v in tree.items()}
    if not any(id(t) in new for t in tensors_of(tree)):
        return tree
    if isinstance(tree, tuple):  # a NamedTuple
        return type(tree)(*(replace_tensors(v, new) for v in tree))
    other = copy.copy(tree)
    parts = _parts(tree)
    if parts is None:
        return tree_map(lambda t: replace_tensors(t, new) if isinstance(t, Tensor) else t, tree)
    for name, value in parts.items():
        if isinstance(other, (MutableMapping, list)):
            other[name] = replace_tensors(value, new)
        else:
            object.__setattr__(other, name, replace_tensors(value, new))
    return other


def results(out: Any) -> Sequence[Any]:
    """Return the results of a call as a sequence."""
    return out if isinstance(out, (list, tuple)) else (out,)


def replaced(value: Any, new: dict[int, Any]) -> Any:
    """Return an argument with some tensors, named by their id, replaced. The tensors may be in a
    list or tuple.
    """
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    return type(value)([replaced(v, new) for v in value]) if type(value) in (list, tuple) else value


def swap(
    args: Sequence[Any], kwargs: dict[str, Any], new: dict[int, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with some tensors, named by their id, replaced."""
    return [replaced(a, new) for a in args], {
        k: replaced(v, new) for k, v in kwargs.items()
    } if kwargs else kwargs


def flatten(bound: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensor arguments by name; the elements of a list as `name.0`, `name.1`, …"""
    flat = {}
    for name, value in bound.items():
        if isinstance(value, Tensor):
            flat[name] = value
        elif isinstance(value, (list, tuple)):
            flat |= {f"{name}.{i}": v for i, v in enumerate(value) if isinstance(v, Tensor)}
    return flat


def without_tensors(bound: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with None for each tensor, so that keeping them keeps no memory."""
    return {
        name: None
        if isinstance(v, Tensor)
        else [None if isinstance(u, Tensor) else u for u in v]
        if isinstance(v, (list, tuple))
        else v
        for name, v in bound.items()
    }


def refill(bound: dict[str, Any], saved: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments with the saved tensors in them again, and None for tensors that were not
    saved.
    """
    full = dict(bound)
    for name, t in saved.items():
        base, dot, index = name.partition(".")
        if dot:
            full[base] = [t if i == int(index) else v for i, v in enumerate(full[base])]
        else:
            full[base] = t
    return full
