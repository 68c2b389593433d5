"""Save and restore the state of a model: attributes of its modules and values of its tensors."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from varreg import _torch
from varreg.engine.rehearsal.random_state import is_generator
from varreg.errors import VarregError

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by number of bytes, in which nans can be compared."""


class ModelState:
    """A saved state of a model: attributes of its modules, and the values of all tensors in
    them.
    """

    def __init__(self, model: nn.Module):
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self._containers: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._hooks: set[int] = set()
        self._visit(model)
        self._tensor_states = [_TensorState(t) for t in self.tensors]

    def _visit(self, root: Any) -> None:
        """Collect tensors, generators and containers in modules, lists, dicts and sets. Collect
        also the attributes of objects in these, such as a counter, but not of objects inside of
        such objects: a trainer may hold everything.
        """
        stack = [(root, False)]
        while stack:
            value, is_in_object = stack.pop()
            is_module = isinstance(value, nn.Module)
            if id(value) in self._seen:
                continue
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif is_generator(value):
                self.generators.append(value)
            elif is_module or isinstance(value, dict):
                container = value.__dict__ if is_module else value
                self._containers.append((container, dict(container)))
                if is_module:
                    self._hooks |= {id(v) for k, v in container.items() if "_hooks" in k}
                stack += [(v, is_in_object and not is_module) for v in container.values()]
            elif isinstance(value, (list, set, deque)):
                self._containers.append((value, list(value)))
                stack += [(v, is_in_object) for v in value]
            elif isinstance(value, tuple):
                stack += [(v, is_in_object) for v in value]
            elif not is_in_object and _is_of_user(value):
                self._containers.append((value.__dict__, dict(value.__dict__)))
                stack += [(v, True) for v in value.__dict__.values()]
            else:
                continue
            self._seen[id(value)] = value  # kept alive, so that no other object gets its id

    def restore(self, hooks: bool) -> None:
        """Restore everything; hooks of modules only if `hooks` is True."""
        for container, before in self._containers:
            if hooks or id(container) not in self._hooks:
                _refill(container, before)
        for state in self._tensor_states:
            state.restore()


def _is_of_user(value: Any) -> bool:
    """Return whether an object has attributes, and is neither code nor one of torch's or ours."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType, partial)):
        return False
    home = type(value).__module__.partition(".")[0]
    return (
        home not in ("torch", "varreg", "builtins")
        and type(getattr(value, "__dict__", None)) is dict
    )


def _refill(container: Any, before: Any) -> None:
    """Restore the contents of a container, if they are not the same objects in the same order."""
    pairs = isinstance(before, dict)
    now, old = ([*container.items()], [*before.items()]) if pairs else ([*container], before)
    if len(now) == len(old):
        if not pairs and all(a is b for a, b in zip(now, old, strict=True)):
            return
        if pairs and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, old, strict=True)):
            return
    container.clear()
    container.extend(before) if isinstance(container, (list, deque)) else container.update(before)


class _TensorState:
    """The saved state of one tensor."""

    def __init__(self, t: Tensor):
        if is_lazy(t):
            raise VarregError(
                "varreg: the model has a lazy parameter or buffer without a shape, which cannot be "
                "put back. Run the model once, model(x), so that all of its tensors exist."
            )
        self.tensor, self.requires_grad, self.is_leaf = t, t.requires_grad, t.is_leaf
        self.data, self.values = t.data, t.detach().clone()
        self.version = None if t.is_inference() else t._version

    def restore(self) -> None:
        """Restore the memory, the values, and `requires_grad`."""
        t = self.tensor
        if self.is_leaf and t.requires_grad != self.requires_grad:
            t.requires_grad_(self.requires_grad)
        if not _is_same_memory(t, self.data):
            t.data = self.data
        if not _is_equal(t.data, self.values):
            self.data.copy_(self.values)
        if self.version is not None and t._version != self.version:
            # The values are the old ones, so a graph that saved this tensor stays valid.
            _torch.set_versions((t,), (self.version,))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory; False if that cannot be
    determined.
    """
    if a.layout is not torch.strided or type(a.data) is not Tensor:
        return a.shape == b.shape
    same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return same and a.device == b.device and a.data_ptr() == b.data_ptr()


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, including nans and signed zeros; False if
    they cannot be compared.
    """
    try:
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if a.is_floating_point() and a.layout is torch.strided:
            a, b = a.view(_INTEGER[a.element_size()]), b.view(_INTEGER[b.element_size()])
        return torch.equal(a, b)
    except (RuntimeError, TypeError):
        return False
