"""Make expensive things once for all of pytest's workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock


def _place(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a path that all workers of this run have in common, and no other run."""
    folder = factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """Return the result of `make`. The first worker that asks computes it; the others read it."""
    path = _place(factory, f"{name}.pt")
    with FileLock(f"{path}.lock"):
        if not path.exists():
            torch.save(make(), path)
        return torch.load(path, weights_only=False)


def folder_once(
    factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], str]
) -> tuple[Path, str]:
    """Return a folder that `fill` has filled for the first worker that asked, and what `fill`
    returned.

    Tests must not change the folder; they may copy it.
    """
    folder = _place(factory, name)

    def filled() -> str:
        folder.mkdir()
        return fill(folder)

    return folder, once(factory, f"{name}-said", filled)
