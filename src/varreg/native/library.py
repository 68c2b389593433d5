"""The compiled library: built at first use, if a C compiler is at hand, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_REALS = {torch.float32: "float32", torch.float64: "float64"}
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno", "-std=gnu99", "-shared", "-fPIC")


@functools.cache
def status() -> str:
    """Either `in use`, or why not."""
    return load()[1]


def serves(*tensors: Tensor) -> bool:
    """Are these tensors of one kind that the library knows, on the CPU? Then it is loaded; if it cannot be, it serves nothing."""
    dtype = tensors[0].dtype
    return dtype in _REALS and all(t.dtype == dtype and t.is_cpu for t in tensors) and load()[0] is not None


def threads_for(work: int) -> int:
    """Torch's own, where there is enough to do."""
    return torch.get_num_threads() if work >= 1 << 15 else 1


def call(name: str, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], numbers: tuple[float, ...], threads: int) -> None:
    """Call a function of the library for elements of the first tensor's type: tensors, sizes, numbers, threads."""
    assert tensors[0] is not None
    function = _function(name, tensors[0].dtype, len(tensors), len(sizes), len(numbers))
    function(*[None if t is None else t.data_ptr() for t in tensors], *sizes, *numbers, threads)


def call_for_all(name: str, dtype: torch.dtype, tasks: list[bytes], threads: int) -> None:
    """Call a function of the library that works on many tensors at once, each of which is described by a task."""
    getattr(load()[0], f"{name}_{_REALS[dtype]}")(ctypes.c_int64(len(tasks)), b"".join(tasks), threads)


@functools.cache
def _function(name: str, dtype: torch.dtype, tensors: int, sizes: int, numbers: int) -> Any:
    function = getattr(load()[0], f"{name}_{_REALS[dtype]}")
    function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_int64] * sizes + [ctypes.c_double] * numbers + [ctypes.c_int]
    function.restype = None
    return function


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None; and its status."""
    if os.environ.get("VARREG_NATIVE") == "0":
        return None, "switched off by VARREG_NATIVE=0"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler was found"
    try:
        with tempfile.TemporaryDirectory(prefix="varreg-") as temporary:
            return ctypes.CDLL(str(_built(shlex.split(compiler), Path(temporary)))), "in use"
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        return None, f"{compiler} did not work: {str(detail).strip().splitlines()[-1] if detail else type(error).__name__}"


def _built(compiler: list[str], temporary: Path) -> Path:
    """The compiled library: kept in the cache if that can be written, for this compiler and processor; else in a temporary folder."""
    here = Path(__file__).parent
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = "".join(path.read_text() for path in sorted(here.glob("*.[ch]")))
    flags = [*_FLAGS, *shlex.split(os.environ.get("VARREG_NATIVE_FLAGS", ""))]
    key = hashlib.sha256("\n".join([sources, version, *flags, _processor()]).encode()).hexdigest()[:16]
    for kept in _cache().glob(f"kernels-{key}-*.so") if _cache().is_dir() else ():
        if kept.stem == f"kernels-{key}-{kept.stat().st_size}":  # else it was damaged
            return kept
    made = temporary / "kernels.so"
    command = [*compiler, *flags, str(here / "kernels.c"), "-o", str(made)]
    done = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True, check=False)
    if done.returncode:  # without threads, then
        subprocess.run([*command, "-Wno-unknown-pragmas"], capture_output=True, text=True, check=True)
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            copy = Path(shutil.copyfile(made, Path(folder) / made.name))
            return copy.replace(_cache() / f"kernels-{key}-{copy.stat().st_size}.so")  # whole, or not at all
    except OSError:
        return made


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "varreg"
    except RuntimeError:  # there is no home
        return Path(os.devnull) / "varreg"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    flags = (
        [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))][:1] if info.exists() else []
    )
    return " ".join([platform.system(), platform.machine(), platform.processor(), *flags])
