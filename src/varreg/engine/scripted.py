"""Scripted functions in the code of a model: no mode sees their calls, and they may return a
number.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from varreg import _torch
from varreg.engine.trace.arguments import content
from varreg.thresholds import MOST_OBJECTS


def calls_scripted(model: nn.Module) -> bool:
    """Return whether the code of a model names a scripted function. The search covers the forward
    of its modules, functions that are attributes of modules, and all functions that these name, if
    they are the user's own.
    """
    if not _torch.has_scripted_functions():
        return False
    rest: list[Any] = [f for m in model.modules() for f in (type(m).forward, *vars(m).values())]
    seen: set[int] = set()
    while rest and len(seen) < MOST_OBJECTS:
        value = rest.pop()
        if isinstance(value, torch.jit.ScriptFunction):
            return True
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, FunctionType) and id(value) not in seen:
            seen.add(id(value))
            if (value.__module__ or "").partition(".")[0] not in ("torch", "varreg"):
                rest += _named(value)
    return False


def _named(function: FunctionType) -> list[Any]:
    """Return the objects that a function names: globals, and the contents of its closure and
    defaults.
    """
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    cells = map(content, function.__closure__ or ())
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
    return [*held, *(function.__globals__.get(name) for name in names)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and the code of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
