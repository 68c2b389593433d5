"""Element-wise work in one pass over memory, by a few lines of C.

They are compiled at first use, in less than a second, if a C compiler is at hand, and kept in the user's cache. Without one, the
same is done by a dozen of PyTorch's own operations: slower, with the same numbers. `VARREG_NATIVE=0` asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_KINDS = {"sum": 0, "mean": 1, "harmonic": 2}
_FORMS = {"rational": 0, "affine": 1}
_REALS: dict[torch.dtype, tuple[str, Any]] = {
    torch.float32: ("float32", ctypes.c_float),
    torch.float64: ("float64", ctypes.c_double),
}
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-std=c99", "-shared", "-fPIC")


@functools.cache
def status() -> str:
    """Either `in use`, or why not."""
    return _load()[1]


def lambdas(
    variance: Tensor,
    delta: Tensor,
    history: Tensor,
    count: Tensor,
    present: Tensor | None,
    limit: float | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """λ, with ρ entered into its history; None where it takes PyTorch: another device, form or history, or memory in different orders."""
    tensors = (variance, delta, history, count, *(() if present is None else (present,)))
    if options["history"] not in _KINDS or options["form"] not in _FORMS:
        return None
    library = _library_for(*tensors)
    if library is None:
        return None
    from varreg.regularizer import bounds, lambda0_of

    low, high = bounds(options)
    lam = torch.empty_like(delta)
    s = float(options["s"])
    numbers = (
        s,
        lambda0_of(s) / 2,
        math.inf if limit is None else limit,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )
    kinds = (int(present is not None), _KINDS[options["history"]], _FORMS[options["form"]], int(options["scale_free"]))
    _run(library, "lambda", (*tensors[:4], variance if present is None else present, lam), kinds, numbers)
    return lam


def variance(total: Tensor, square: Tensor, m: int, factor: float, rounding: float, out: Tensor) -> bool:
    """(m·W − S²)·factor into `out`, and 0 where that is no more than rounding; False where it takes PyTorch."""
    library = _library_for(total, square, out)
    if library is not None:
        _run(library, "variance", (total, square, out), (), (m, factor, rounding))
    return library is not None


def _library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The library, if it can serve these tensors: on the CPU, alike, and in one order."""
    first = tensors[0]
    if first.dtype not in _REALS or not first.is_cpu:
        return None
    for t in tensors:
        if t.shape != first.shape or t.dtype != first.dtype or not t.is_cpu or not t.is_contiguous():
            return None
    return _load()[0]


def _run(
    library: ctypes.CDLL, name: str, tensors: tuple[Tensor, ...], kinds: tuple[int, ...], numbers: tuple[float, ...]
) -> None:
    suffix, real = _REALS[tensors[0].dtype]
    n = tensors[0].numel()
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    threads = torch.get_num_threads() if n >= 1 << 15 else 1
    getattr(library, f"{name}_{suffix}")(ctypes.c_int64(n), *pointers, *kinds, *map(real, numbers), threads)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
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
    sources = "".join((here / name).read_text() for name in ("kernels.c", "kernels.h"))
    key = hashlib.sha256("\n".join([sources, version, *_FLAGS, _processor()]).encode()).hexdigest()[:16]
    kept = _cache() / f"kernels-{key}.so"
    if kept.exists():
        return kept
    made = temporary / "kernels.so"
    command = [*compiler, *_FLAGS, str(here / "kernels.c"), "-o", str(made)]
    done = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True, check=False)
    if done.returncode:  # without threads, then
        subprocess.run([*command, "-Wno-unknown-pragmas"], capture_output=True, text=True, check=True)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(made.read_bytes())
        Path(file.name).replace(kept)  # whole, or not at all
        return kept
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
