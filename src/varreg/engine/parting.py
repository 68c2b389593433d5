"""Where the whole batch and its single samples part: the first operation whose results differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varreg.engine.arguments import tensors_of
from varreg.engine.checks import place
from varreg.engine.propagation import name_of

_NUMBERS = frozenset(("item", "tolist", "__float__", "__int__", "__bool__", "__index__"))
"""Functions that give values of a tensor to Python."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One call of a torch function, as people look for it."""

    function: str
    module: str
    """The path and type of the module whose forward made the call."""
    whole: Shape
    """The shape of its result for the whole batch."""
    single: Shape
    """And for one sample."""

    def __str__(self) -> str:
        return f"`{self.function}` in {self.module}"


@dataclass(frozen=True)
class Parting:
    """Where the whole batch and its single samples part."""

    at: Operation
    """The first operation in whose result the row of a sample depends on other samples."""
    source: Operation | None
    """The first one before it that made one value of all samples, such as their mean."""
    instead: str = ""
    """Not empty: the function that one sample calls there. From there on, they do other things."""

    def __str__(self) -> str:
        if self.instead:
            return f"{self.at}, where one sample goes on with `{self.instead}`"
        shapes = f"shape {self.at.whole}; {self.at.single} for one sample"
        after = "" if self.source is None else f", after {self.source}, which depends on all samples"
        return f"{self.at} ({shapes}){after}"


class Part(NamedTuple):
    """How far a sample's part of a whole result is from the result for that sample alone."""

    gap: float
    """Relative to the largest value of the whole."""
    has_rows: bool
    """Has the whole a part for every sample? Else it is one value for all of them."""


def compare(whole: Tensor, single: Tensor, i: int, n: int) -> Part | None:
    """Compare sample i of n with its own result; None where shapes do not tell which part is its."""
    if not whole.is_floating_point() or whole.dtype != single.dtype or whole.dim() != single.dim():
        return None
    other = [d for d in range(whole.dim()) if whole.shape[d] != single.shape[d]]
    if not whole.numel() or not single.numel():
        return None
    if not other:
        return Part(_gap([whole], single, whole), False)
    d = other[0]
    k = single.shape[d]
    if len(other) > 1 or whole.shape[d] != n * k:
        return None
    folds = (whole.unflatten(d, (a, n, k // a)) for a in range(1, k + 1) if k % a == 0)
    return Part(_gap([fold.select(d + 1, i).flatten(d, d + 1) for fold in folds], single, whole), True)


def _gap(candidates: Sequence[Tensor], single: Tensor, whole: Tensor) -> float:
    """Return the smallest of the largest differences, relative to the largest finite value."""
    size = float(whole.abs().nan_to_num(0.0, 0.0, 0.0).max())
    gaps = []
    for part in candidates:
        same = (part == single) | (part.isnan() & single.isnan())
        off = torch.where(same, 0.0, (part - single).abs()).nan_to_num(torch.inf, torch.inf)
        gaps.append(float(off.max()))
    return min(gaps) / size if size else (0.0 if min(gaps) == 0 else torch.inf)


class _Call(NamedTuple):
    function: str
    module: str
    results: list[Tensor]


class _Recorder(TorchFunctionMode):
    """Notes the results of all calls, or hands them on one by one."""

    def __init__(self, paths: _Paths, heard: Callable[[_Call], None]):
        super().__init__()
        self.paths, self.heard = paths, heard

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = name_of(func)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            results = tensors_of(args[0] if func is Tensor.__setitem__ else out)
            if name in _NUMBERS:
                results = [torch.tensor(out, dtype=torch.float64)]
            self.heard(_Call(name, self.paths.now, results))
        return out


class _Paths:
    """The module whose forward is running."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.stack = [place("", model)]

    @property
    def now(self) -> str:
        return self.stack[-1]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            where = place(name, module)
            handles.append(module.register_forward_pre_hook(lambda *_, w=where: self._enter(w)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, where: str) -> None:
        self.stack.append(where)

    def _leave(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()


def find_parting(model: nn.Module, run: Callable[[int | None], object], n: int, rtol: float) -> Parting | None:
    """Run the whole batch, `run(None)`, and each sample, `run(i)`; return where they part first.

    Calls are compared up to the first that is of another function. If nothing differs up to there,
    that is where they part, though it need not mean much: a loop over samples makes more calls for
    the whole batch. None where both make the same calls, with the same results.
    """
    paths = _Paths(model)
    calls: list[_Call] = []

    def record(call: _Call) -> None:
        calls.append(call._replace(results=[t.detach().clone() for t in call.results]))

    partings: list[tuple[bool, int, Parting]] = []
    with paths.followed():
        with _Recorder(paths, record):
            run(None)
        for i in range(n):
            seen = _Comparison(calls, i, n, rtol)
            with _Recorder(paths, seen.hear):
                run(i)
            if seen.found is not None:
                partings.append((bool(seen.found.instead), seen.at, seen.found))
    return min(partings, key=lambda found: found[:2])[2] if partings else None


class _Comparison:
    """One sample's calls against those of the whole batch."""

    def __init__(self, calls: Sequence[_Call], i: int, n: int, rtol: float):
        self.calls, self.i, self.n, self.rtol = calls, i, n, rtol
        self.at = 0
        self.found: Parting | None = None
        self.source: Operation | None = None

    def hear(self, call: _Call) -> None:
        if self.found is not None or self.at >= len(self.calls):
            return
        whole = self.calls[self.at]
        if whole.function != call.function or len(whole.results) != len(call.results):
            there = Operation(whole.function, whole.module, (), ())
            self.found = Parting(there, None, call.function)
            return
        for a, b in zip(whole.results, call.results, strict=True):
            part = compare(a, b, self.i, self.n)
            if part is None or part.gap <= self.rtol:
                continue
            there = Operation(call.function, whole.module, tuple(a.shape), tuple(b.shape))
            if part.has_rows:
                self.found = Parting(there, self.source)
                return
            self.source = self.source or there
        self.at += 1
