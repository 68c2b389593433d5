"""Record all calls of torch functions in a forward, with the module that makes each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varreg import _torch
from varreg.engine.refusals import describe_module
from varreg.engine.trace.arguments import tensors_of
from varreg.engine.trace.functions import name_of

_NUMBERS = frozenset(("item", "tolist", "__float__", "__int__", "__bool__", "__index__"))
"""Functions that return values of a tensor to Python."""


class RecordedCall(NamedTuple):
    """One call of a torch function."""

    function: str
    module: str
    """The path and type of the module whose forward made the call."""
    results: list[Tensor]


class Recorder(TorchFunctionMode):
    """Passes every call to a listener, one by one."""

    def __init__(self, paths: ModulePaths, listener: Callable[[RecordedCall], None]):
        super().__init__()
        self.paths, self.listener = paths, listener

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = name_of(func)
        with _torch.DisableTorchFunction(), torch.no_grad():
            results = tensors_of(args[0] if func is Tensor.__setitem__ else out)
            if name in _NUMBERS:
                results = [torch.tensor(out, dtype=torch.float64, device="cpu")]
            self.listener(RecordedCall(name, self.paths.current, results))
        return out


class ModulePaths:
    """The path of the module whose forward is running."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.stack = [describe_module("", model)]

    @property
    def current(self) -> str:
        """Return the path and type of the innermost module."""
        return self.stack[-1]

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the forward of every module inside of the `with` block."""
        handles = []
        for name, module in self.model.named_modules():
            path = describe_module(name, module)
            handles.append(module.register_forward_pre_hook(lambda *_, w=path: self._enter(w)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> None:
        self.stack.append(path)

    def _leave(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
