"""A pretend device: host memory and the CPU's kernels behind torch's interface for new
accelerators.

It stands for GPUs on machines that have none. `load()` compiles it once and registers it as the
device "pretend". It stays registered for the rest of the process, so tests that use it run in their
own process. `count()` counts the kernels that a GPU would have launched, and records where the host
waited for a value.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from tests.support.pretend_device import cells

NAME = "pretend"
_KEPT: list[torch.library.Library] = []  # kernels are there as long as their library lives
_SOURCE = Path(__file__).parent / "device.cpp"
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def why_not() -> str | None:
    """Return why there is no pretend device here; None if there is one."""
    if sys.platform != "linux":
        return "the pretend device is built on Linux alone"
    if _compiler() is None:
        return "the pretend device needs a C++ compiler"
    return None


@functools.cache
def load() -> types.ModuleType:
    """Return the module of the device, `torch.pretend`, with the device registered."""
    library = ctypes.CDLL(str(_built()))
    for name in ("launches", "synchronisations", "allocated", "most_allocated"):
        getattr(library, f"pretend_{name}").restype = ctypes.c_int64
    library.pretend_set_float64.argtypes = [ctypes.c_bool]
    library.pretend_on_launch.argtypes = [ctypes.c_void_p]
    library.pretend_on_synchronisation.argtypes = [ctypes.c_void_p]
    library.pretend_register()
    rename_privateuse1_backend(NAME)
    module = _module(library)
    _KEPT.append(cells.register())
    torch._register_device_module(NAME, module)
    generate_methods_for_privateuse1_backend()
    return module


@dataclass
class Count:
    """What a block of code asked of the device."""

    launches: Counter[str] = field(default_factory=Counter)
    """The number of kernels of each operator; for `_foreach_` operators, the number of calls."""
    launched: int = 0
    """Kernels, all together."""
    waits: Counter[str] = field(default_factory=Counter)
    """Synchronisations: the operator, and the line of varreg, or otherwise of the caller."""

    def __add__(self, other: Count) -> Count:
        return Count(
            self.launches + other.launches,
            self.launched + other.launched,
            self.waits + other.waits,
        )


@contextlib.contextmanager
def count() -> Iterator[Count]:
    """Count launches and synchronisations, in all threads."""
    library, counted = load().library, Count()

    def launched(name: bytes) -> None:
        counted.launches[name.decode()] += 1

    def waited(name: bytes) -> None:
        counted.waits[f"{name.decode()} at {_line()}"] += 1

    calls = _CALLBACK(launched), _CALLBACK(waited)
    library.pretend_reset()
    library.pretend_on_launch(ctypes.cast(calls[0], ctypes.c_void_p))
    library.pretend_on_synchronisation(ctypes.cast(calls[1], ctypes.c_void_p))
    try:
        yield counted
    finally:
        library.pretend_on_launch(None)
        library.pretend_on_synchronisation(None)
        counted.launched = library.pretend_launches()


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Switch float64 off inside the `with` block: Apple's GPUs do not have it."""
    library = load().library
    library.pretend_set_float64(False)
    try:
        yield
    finally:
        library.pretend_set_float64(True)


def _line() -> str:
    """Return the innermost line of varreg that runs; without one, the innermost of all."""
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    ours = [f for f in frames if "/src/varreg/" in f.filename] or frames
    return f"{ours[-1].filename.rpartition('/src/varreg/')[2]}:{ours[-1].lineno}"


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """Return the module of the device, with the functions that torch calls."""
    module = types.ModuleType(f"torch.{NAME}")
    ops = torch.ops.pretend
    functions = {
        "library": library,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "manual_seed": ops.seed,
        "manual_seed_all": ops.seed,
        "get_rng_state": lambda device=None: ops.get_state(),
        "set_rng_state": lambda state, device=None: ops.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "memory_allocated": lambda device=None: library.pretend_allocated(),
        "max_memory_allocated": lambda device=None: library.pretend_most_allocated(),
        "reset_peak_memory_stats": lambda device=None: library.pretend_forget_most(),
        "device": _Device,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _Device,
        "current_stream": lambda device=None: _Stream(),
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


class _Device:
    """`with torch.pretend.device(...)`: there is only one."""

    def __init__(self, device: object):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Stream:
    """A stream, or an event in it. There is one stream, so waiting does nothing."""

    def __init__(self, *_: object, **__: object):
        pass

    def record_event(self, event: object = None) -> _Stream:
        return self

    def wait(self, *_: object) -> None:
        pass

    record = wait_stream = wait_event = wait

    def synchronize(self) -> None:
        torch.accelerator.synchronize()  # which is counted


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def _built() -> Path:
    """Return the compiled library, made once for each source, torch and compiler."""
    folder = Path(torch.__file__).parent
    content = _SOURCE.read_text() + torch.__version__ + str(folder) + str(_compiler())
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"varreg-tests-{os.getuid()}"
    made = kept / f"pretend-{key}.so"
    if made.exists():
        return made
    kept.mkdir(mode=0o700, exist_ok=True)
    include = folder / "include"
    with tempfile.TemporaryDirectory(dir=kept) as temporary:
        out = Path(temporary) / made.name
        command = [
            *(str(_compiler()), "-std=c++20", "-O1", "-shared", "-fPIC", str(_SOURCE)),
            *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-L{folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(out)),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return out.replace(made)
