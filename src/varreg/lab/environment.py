"""Where a result comes from: versions, commit, machine."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import varreg
from varreg import native


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of varreg, where it runs from a clone; a + at the end says that files were changed since."""

    def git(*arguments: str) -> str:
        folder = Path(varreg.__file__).parent
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "--", "..").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def environment() -> dict[str, Any]:
    return {
        "varreg": varreg.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "kernels": native.status(),
    }


def machine() -> str:
    """In a line, for people: what a measured time depends on."""
    e = environment()
    threads = torch.get_num_threads()
    of = f"{threads} thread{'s' * (threads > 1)} on {e['cores']} core{'s' * (e['cores'] > 1)}"
    return f"{e['processor']}, {of}, Python {e['python']}, torch {e['torch']}, native library {e['kernels']}"
