"""Files of a run: written whole or not at all, so that a run can be killed at any moment."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch


def write(path: Path, content: bytes) -> None:
    """Into a temporary file in the same folder, through to the disk, and then under its name, in place of what was there."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    write(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=True) + "\n").encode())


def write_tensors(path: Path, value: Any) -> None:
    """What `torch.load(weights_only=True)` reads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write(path, buffer.getvalue())


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for left in folder.glob(".*.*"):
        left.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Before hours of work: can results be kept here?"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "probe", b"")
        (folder / "probe").unlink()
    except OSError as error:
        raise ValueError(f"varreg: results cannot be written to {folder}: {error.strerror or error}.") from error
