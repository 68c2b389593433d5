"""Files of a run: written whole or not at all, so that a run can be killed at any moment."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch

PATIENCE = 10.0
"""Seconds to wait for another process."""
_UMASK = os.umask(0)
os.umask(_UMASK)  # there is no other way to ask for it


def write(path: Path, content: bytes) -> None:
    """Into a temporary file in the same folder, through to the disk, and then under its name, in place of what was there."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o666 & ~_UMASK)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """A number that is not finite, which JSON does not have, is written as the word for it: "nan", "inf", "-inf"."""
    write(path, (json.dumps(_to_json(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    return _from_json(json.loads(path.read_text(encoding="utf-8")))


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _to_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: _to_json(v) for k, v in value.items()}
    return [_to_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _from_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def write_tensors(path: Path, value: Any) -> None:
    """What `torch.load(weights_only=True)` reads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write(path, buffer.getvalue())


class BusyError(ValueError):
    """Another process is at work there."""


@contextlib.contextmanager
def alone(folder: Path, what: str, patience: float | None = None) -> Iterator[None]:
    """No two processes at work on one folder. A lock ends with its process, however that ends."""
    try:
        with filelock.FileLock(folder / ".lock", timeout=PATIENCE if patience is None else patience):
            yield
    except filelock.Timeout:
        raise BusyError(f"varreg: another process is at work on {what}, in {folder}. Wait for it, or end it.") from None


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for left in folder.glob(".*.*"):
        left.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Before hours of work: can results be kept here?"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"varreg: results cannot be written to {folder}: {error.strerror or error}.") from error
