"""The environment of a result: versions, commit, machine."""

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
from varreg.backends import BACKENDS


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of varreg, if it runs from a clone; a + at the end means that files were
    changed since.
    """

    def git(*arguments: str) -> str:
        folder = Path(varreg.__file__).parent
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout

    try:
        return git("rev-parse", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "--", "..").strip() else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def environment() -> dict[str, Any]:
    """Return versions, commit and machine."""
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


def device_name(device: str) -> str:
    """Return a device with the name of its hardware."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device if name is None else f"{device} ({name(torch.device(device))})"


def device_kernels(device: str) -> dict[str, Any]:
    """Return which kernels serve a device, with the options of kernels in Triton."""
    backend = BACKENDS[torch.device(device).type]
    found: dict[str, Any] = {"status": backend.status(), "triton": False}
    if getattr(backend, "__name__", "") == "varreg.triton":
        from varreg.triton.settings import SETTINGS

        found |= {"triton": True, "precision": SETTINGS.precision, "tile": list(SETTINGS.tile)}
    return found


def _kernels(device: str) -> str:
    """Return the same in words."""
    found = device_kernels(device)
    if not found["triton"]:
        return f"no kernels ({found['status']})"
    tile = "×".join(map(str, found["tile"][:3]))
    return f"{found['status']}, {found['precision']}, tile {tile}, {found['tile'][3]} warps"


def machine(device: str = "cpu") -> str:
    """Return one line of text with everything that a measured time depends on."""
    e = environment()
    threads = torch.get_num_threads()
    used = f"{threads} thread{'s' * (threads > 1)} on {e['cores']} core{'s' * (e['cores'] > 1)}"
    versions = f"Python {e['python']}, torch {e['torch']}, native library {e['kernels']}"
    on = "" if device == "cpu" else f"{device_name(device)}, {_kernels(device)}, beside "
    return f"{on}{e['processor']}, {used}, {versions}"
