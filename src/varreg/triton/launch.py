"""The shared parts of all kernels in Triton: checks of tensors, launching, and jitted functions
that several kernels call.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton
from varreg import thresholds
from varreg._torch import has_storage

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU."""
_LOADED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
if INTERPRETED:  # it multiplies matrices of bfloat16 as if they were integers
    _LOADED.remove(torch.bfloat16)

EXPLICIT = {"enable_fp_fusion": True}
"""Options of every launch. Triton would warn if they kept their defaults. a·b + c is rounded once,
as in C.
"""


def status() -> str:
    """Return the name and version of Triton, and whether kernels are interpreted."""
    return f"Triton {triton.__version__}{' (interpreted)' if INTERPRETED else ''}"


def takes(*tensors: Tensor) -> bool:
    """Return whether the kernels can read these tensors: plain tensors with memory, of real
    numbers, on one device.
    """
    device = tensors[0].device
    return all(
        type(t) is Tensor and t.dtype in _LOADED and t.device == device and has_storage(t)
        for t in tensors
    )


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **meta: Any) -> None:
    """Run a kernel on the device of a tensor."""
    with on_device(like):
        kernel[grid](*args, **meta, **EXPLICIT)


def on_device(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a tensor's device is the current one: Triton launches there."""
    if like.is_cpu:
        return contextlib.nullcontext()
    module: Any = torch.get_device_module(like.device)
    guard: contextlib.AbstractContextManager[Any] = module.device(like.device)
    return guard


def real(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def power(n: int, least: int, most: int) -> int:
    """Return the smallest power of two that is at least n, limited to `least` and `most`."""
    return max(least, min(most, int(triton.next_power_of_2(n))))


def splits(programs: int, pieces: int) -> int:
    """Return into how many splits to divide the pieces of work, so that there are enough programs
    for a GPU.
    """
    return max(1, min(pieces, thresholds.TRITON_PROGRAMS // max(programs, 1)))


@triton.jit
def group_of(u, batch, groups):
    """Return the first sample of group u, and the number of its samples. Larger groups come first,
    as in engine/partition.py.
    """
    n, larger = batch // groups, batch % groups
    return u * n + tl.minimum(u, larger), n + (u < larger).to(tl.int32)
