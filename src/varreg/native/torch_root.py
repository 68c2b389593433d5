"""Find the function by which torch computes square roots: on x86 it is one of MKL's, which does not
always round to the nearest number.

The library calls it where it repeats torch's own step. `optim/whole_step.py` tests whether it then
repeats torch's numbers. If it does not, torch takes its own step.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

_NAMES = {torch.float32: "vmsSqrt", torch.float64: "vmdSqrt"}
MODE = 0x2 | 0x100 | 0x140000
"""High accuracy, no report of errors, and numbers below the normal ones are kept, as torch asks for
(aten/src/ATen/cpu/vml.h).
"""


_SET_THREADS = "MKL_Set_Num_Threads_Local"


@functools.cache
def torch_root(dtype: torch.dtype) -> tuple[int | None, int | None]:
    """Return the addresses of two functions of MKL in torch's own library: one for square roots,
    and one that sets its number of threads in the thread that calls it. Return None twice if it has
    none: then torch rounds to the nearest number.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        functions = getattr(library, _NAMES[dtype]), getattr(library, _SET_THREADS)
    except (OSError, AttributeError):
        return None, None
    root, set_threads = (ctypes.cast(f, ctypes.c_void_p).value for f in functions)
    return root, set_threads
