"""The element-wise work of the regularizer in one pass over memory, by a few lines of C.

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
    if options["history"] not in _KINDS or options["form"] not in _FORMS or variance.dtype not in (torch.float32, torch.float64):
        return None
    alike = (t.device.type == "cpu" and t.shape == delta.shape and t.dtype == delta.dtype and t.is_contiguous() for t in tensors)
    library = _load()[0]
    if library is None or not all(alike):
        return None
    from varreg.regularizer import bounds, lambda0_of

    low, high = bounds(options)
    lam = torch.empty_like(delta)
    s = float(options["s"])
    run = getattr(library, f"lambda_{str(delta.dtype).removeprefix('torch.')}")
    real = ctypes.c_float if delta.dtype == torch.float32 else ctypes.c_double
    numbers = (
        s,
        lambda0_of(s) / 2,
        math.inf if limit is None else limit,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )
    run(
        ctypes.c_int64(delta.numel()),
        *(ctypes.c_void_p(t.data_ptr()) for t in (*tensors[:4], variance if present is None else present, lam)),
        int(present is not None),
        _KINDS[options["history"]],
        _FORMS[options["form"]],
        int(options["scale_free"]),
        *map(real, numbers),
        torch.get_num_threads() if delta.numel() >= 1 << 15 else 1,
    )
    return lam


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
