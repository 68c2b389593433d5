"""Choose the kernels for a tensor by its device: C on the CPU, Triton on GPUs, or none.

The *definition* of a kernel is the same computation in plain PyTorch, in several passes over
memory; a kernel needs one pass. (The definition is also called the kernel's *twin*, since both must
give the same numbers.) All backends have the same functions. A function returns None (or False) to
leave the work to the definition. The backend of a device without kernels always does.
`choose` in optim/step.py decides which steps use a kernel.

Sums may be S, W, and a second copy of S: the copy becomes `p.grad`, so that PyTorch copies nothing.

    BACKENDS[t.device.type].outer(delta, a, groups)
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from varreg import few_launches, native
from varreg.native.contract import Task
from varreg.native.layer_sums import Sums

Pair = tuple[Tensor, Tensor] | Tensor
"""Two tensors, or one tensor that has both along its first dimension."""


class Backend(Protocol):
    """The functions of a backend. `native` documents each."""

    KNOWS_SINGLE_ROWS: bool

    def status(self) -> str: ...

    # S and W of layers
    def outer(self, delta: Tensor, a: Tensor, groups: int, bias: bool = ...) -> Sums | None: ...
    def conv(
        self,
        x: Tensor,
        delta: Tensor,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        *,
        per: int = ...,
        parts: int = ...,
        bias: bool = ...,
    ) -> Sums | None: ...
    def lookup(
        self,
        ids: Tensor,
        dy: Tensor,
        shape: torch.Size,
        groups: int,
        skip: int | None,
        squares: bool = ...,
    ) -> tuple[Tensor | None, ...] | None: ...

    # sums of contributions, and what normalizations contribute
    def sums(self, values: Tensor, groups: int) -> tuple[Tensor, ...] | None: ...
    def total(self, values: Tensor) -> Tensor | None: ...
    def rows(self, values: Tensor) -> Tensor | None: ...
    def pixels(self, values: Tensor) -> Tensor | None: ...
    def norm_rows(self, x: Tensor, dy: Tensor, eps: float, centre: bool = ...) -> Pair | None: ...
    def norm_channels(
        self,
        x: Tensor,
        dy: Tensor,
        groups: int,
        eps: float,
        mean: Tensor | None = ...,
        var: Tensor | None = ...,
    ) -> Pair | None: ...

    # λ and the step
    def serves(self, *tensors: Tensor) -> bool: ...
    def variance(
        self, total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor
    ) -> bool: ...
    def lambdas(
        self,
        variance: Tensor,
        delta: Tensor,
        history: Tensor,
        count: Tensor,
        present: Tensor | None,
        task: Task,
    ) -> Tensor | None: ...
    def compare(self, rows: Sequence[tuple[Tensor, ...]]) -> list[list[float]]: ...
    def update(
        self, like: Tensor, tasks: ctypes.Array[Task], elements: int, calibrated: bool = ...
    ) -> None: ...


class _Twins:
    """No kernels: every function leaves its work to the definition in PyTorch."""

    KNOWS_SINGLE_ROWS = False

    def __init__(self, reason: str):
        self._reason = reason

    def status(self) -> str:
        return self._reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name.isupper():
            raise AttributeError(name)
        return _leave


def _leave(*args: Any, **kwargs: Any) -> None:
    return None


TWINS: Backend = _Twins("switched off")
"""The backend without kernels. `use` it for a type of device to compute everything by PyTorch."""


class _FewLaunches(_Twins):
    """No kernels: PyTorch's own operations, as few of them as possible."""

    KNOWS_SINGLE_ROWS = True
    outer = staticmethod(few_launches.outer)
    conv = staticmethod(few_launches.conv)
    lookup = staticmethod(few_launches.lookup)
    sums = staticmethod(few_launches.sums)
    norm_rows = staticmethod(few_launches.norm_rows)
    norm_channels = staticmethod(few_launches.norm_channels)


class _Backends(dict[str, Backend]):
    """The backend of each type of device, found when it is first asked for."""

    def __missing__(self, device: str) -> Backend:
        self[device] = found = _find(device)
        return found


_TRITON = ("cuda", "xpu")  # "cuda" is also what torch calls AMD's GPUs


def _find(device: str) -> Backend:
    if device == "cpu":
        return native
    if device not in _TRITON:
        return _FewLaunches(f"there are no kernels for {device}")
    if os.environ.get("VARREG_TRITON") == "0":
        return _FewLaunches("switched off by VARREG_TRITON=0")
    if importlib.util.find_spec("triton") is None:
        return _FewLaunches("Triton is not installed")
    from varreg import triton

    return triton


BACKENDS = _Backends()
"""From the type of a device (`tensor.device.type`) to its backend."""


@contextlib.contextmanager
def use(device: str, backend: Backend) -> Iterator[None]:
    """Use a backend for a type of device inside of the `with` block, for example Triton's
    interpreter for the CPU.
    """
    before = BACKENDS[device]
    BACKENDS[device] = backend
    try:
        yield
    finally:
        BACKENDS[device] = before
