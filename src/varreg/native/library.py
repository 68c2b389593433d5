"""Load the compiled library from the wheel, or from the user's cache. If neither has it, compile it
at first use, if a C compiler is installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varreg._torch import dispatch_modes, has_storage, is_faking
from varreg.native import build, cache, contract
from varreg.thresholds import WORTH_THREADS

PLAIN = (Tensor, torch.nn.Parameter)
REALS = {torch.float32: "float32", torch.float64: "float64"}


@functools.cache
def status() -> str:
    """Return `in use`, or the reason why the library is not in use."""
    return load()[1]


def serves(*tensors: Tensor) -> bool:
    """Return whether the library is loaded and can work on these tensors: of one type that it
    knows, on the CPU, and with memory. Fake tensors have no memory, nor have the batched tensors of
    `torch.func`. Return False while FakeTensorMode is active: new tensors would have no memory.
    """
    if dispatch_modes() and is_faking():
        return False
    dtype = tensors[0].dtype
    for t in tensors:  # for every parameter at every step: no generator
        if t.dtype != dtype or not t.is_cpu or type(t) not in PLAIN or not has_storage(t):
            return False
    return dtype in REALS and load()[0] is not None


def threads_for(elements: int) -> int:
    """Return torch's number of threads; 1 if the work is too small for threads."""
    return torch.get_num_threads() if elements >= WORTH_THREADS else 1


def leading_strides(t: Tensor, lead: int) -> tuple[int, ...] | None:
    """Return the strides of the leading dimensions; None if the entries of the other dimensions are
    not adjacent in memory.
    """
    if t.is_contiguous():
        return t.stride()[:lead]
    size = 1
    for n, stride in zip(reversed(t.shape[lead:]), reversed(t.stride()[lead:]), strict=True):
        if n != 1 and stride != size:
            return None
        size *= n
    return t.stride()[:lead]


def side_by_side(t: Tensor, lead: int) -> Tensor:
    """Return a tensor whose entries after the leading dimensions are adjacent in memory: `t`
    itself, or a copy.
    """
    return t if leading_strides(t, lead) is not None else t.contiguous()


def call(
    name: str,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    threads: int,
    shape: contract.Convolution | None = None,
) -> None:
    """Call the version of a library function for the first tensor's type. Pass the tensors, the
    shape of a convolution if there is one, sizes, numbers, and the number of threads.
    """
    assert tensors[0] is not None
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    if shape is not None:
        pointers.append(ctypes.addressof(shape))
    run = function(name, tensors[0].dtype, len(pointers), len(sizes), len(numbers))
    run(*pointers, *sizes, *numbers, threads)


@functools.cache
def for_tasks(name: str, dtype: torch.dtype) -> Any:
    """Return a library function that works on many tensors. Its arguments are the number of tasks,
    an array of `Task`, and the number of threads.
    """
    function = getattr(load()[0], f"{name}_{REALS[dtype]}")
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
    function.restype = None
    return function


@functools.cache
def for_layers(dtype: torch.dtype) -> Any:
    """Return the library function that computes the sums of several layers."""
    function = getattr(load()[0], f"many_layers_{REALS[dtype]}")
    function.argtypes = [ctypes.c_int64, *(ctypes.c_void_p,) * 5, ctypes.c_int]
    function.restype = None
    return function


@functools.cache
def function(name: str, dtype: torch.dtype, pointers: int, sizes: int, numbers: int) -> Any:
    """Return a library function with that number of pointers, sizes and numbers as arguments; the
    last argument is the number of threads.
    """
    found = getattr(load()[0], f"{name}_{REALS[dtype]}")
    found.argtypes = (
        [ctypes.c_void_p] * pointers
        + [ctypes.c_int64] * sizes
        + [ctypes.c_double] * numbers
        + [ctypes.c_int]
    )
    found.restype = None
    return found


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library and its status. If there is none, return None and the reason, and warn,
    unless VARREG_NATIVE=0.
    """
    if os.environ.get("VARREG_NATIVE") == "0":
        return None, "switched off by VARREG_NATIVE=0"
    extra_flags = shlex.split(os.environ.get("VARREG_NATIVE_FLAGS", ""))
    try:
        library = None if extra_flags else _prebuilt()
        library = library or _compiled([*_for_this_processor(), *extra_flags])
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        warnings.warn(
            f"varreg: native code is off, and steps take longer: {reason.rstrip('.')}. Install a "
            "wheel that has it, or a C compiler (gcc 9 or newer, or clang) that CC or PATH finds; "
            "or set VARREG_NATIVE=0 to do without.",
            UserWarning,
            stacklevel=2,
        )
        return None, reason
    _share_threads(library)
    return library, "in use"


def _prebuilt() -> ctypes.CDLL | None:
    """Return the wheel's library for this processor, if the wheel has one and it can be loaded."""
    level = torch.backends.cpu.get_cpu_capability().lower()
    for name in [level, "baseline"] if level in build.LEVELS else ["baseline"]:
        path = Path(__file__).parent / "prebuilt" / f"kernels-{name}{cache.SUFFIX}"
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # it is for another system: compile the sources
                return None
    return None


def _compiled(flags: list[str]) -> ctypes.CDLL:
    """Return the library for this processor. Load it if it is in the cache; wait if another process
    compiles it; else compile it. Without a cache folder, load it from a temporary folder.
    """
    compiler_from_env = os.environ.get("CC", "")
    content = [contract.header(), build.sources(), *build.FLAGS, *flags]
    content += [compiler_from_env, _processor()]
    key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    folder = cache.open_folder()
    kept = folder and cache.find(folder, key)
    if kept:
        return ctypes.CDLL(str(kept))
    if folder and not os.access(folder, os.W_OK):
        folder = None
    with (
        cache.locked(folder),
        tempfile.TemporaryDirectory(prefix="varreg-", ignore_cleanup_errors=True) as temporary,
    ):
        kept = folder and cache.find(folder, key)  # another process may have compiled it
        if kept:
            return ctypes.CDLL(str(kept))
        installed = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
        compiler = compiler_from_env or next(installed, None)
        if compiler is None:
            raise RuntimeError("no C compiler was found")
        place = f"kept in {folder}" if folder else "for this process alone"
        print(f"varreg: compiling native code, {place}; some ten seconds", file=sys.stderr)
        compiled_path = Path(temporary) / f"kernels{cache.SUFFIX}"
        build.build(shlex.split(compiler), flags, contract.header(), compiled_path)
        path = cache.keep(folder, key, compiled_path) if folder else compiled_path
        return ctypes.CDLL(str(path))


def _share_threads(library: ctypes.CDLL) -> None:
    """Let a library that has its own threads use torch's threads instead, if these have GNU's
    interface. Idle threads of torch spin for a while, and would compete with the library's own.
    """
    if not hasattr(library, "share_threads") or not hasattr(os, "RTLD_NOLOAD"):
        return
    home = Path(torch.__file__).parent
    found = [*(home / "lib").glob("lib*omp*"), *(home.parent / "torch.libs").glob("lib*omp*")]
    for name in ("libgomp.so.1", *map(str, found)):
        try:
            threads = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            functions = (
                threads.GOMP_parallel,
                threads.omp_get_thread_num,
                threads.omp_get_num_threads,
            )
        except (OSError, AttributeError):  # not loaded, or another interface
            continue
        library.share_threads(*(ctypes.cast(f, ctypes.c_void_p) for f in functions))
        return


def _for_this_processor() -> list[str]:
    # Apple's clang compiles for the machine's own processor on arm64, and may not know the flag
    return [] if (sys.platform, platform.machine()) == ("darwin", "arm64") else ["-march=native"]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return " ".join([platform.system(), platform.machine(), platform.processor(), *flags])
