"""Write and read the files of a run. A file is written completely or not at all, so that a run can
be killed at any moment.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tempfile
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch

from varreg.errors import VarregError

PATIENCE = 10.0
"""Seconds to wait for another process."""
_UMASK = os.umask(0)
os.umask(_UMASK)  # setting the umask is the only way to read it


def write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: write a temporary file in the same folder, flush it to
    the disk, and rename it.
    """
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
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
    """Write JSON. JSON has no numbers that are not finite: they are written as the words "nan",
    "inf" and "-inf".
    """
    write(path, json_of(value))


def json_of(value: Any) -> bytes:
    """Return what `write_json` writes."""
    text = json.dumps(_to_json(value), indent=1, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def read_json(path: Path, remedy: str = "Restore it.") -> Any:
    """Return the value that `write_json` wrote. Raise a `DamagedError` that ends with the remedy if
    the file has other contents.

    Text passes through `printable`, since it is shown on terminals and pages.
    """
    try:
        return _from_json(json.loads(_content(path).decode("utf-8")))
    except RecursionError:
        raise damaged(path, "JSON", "brackets within brackets without end", remedy) from None
    except (OSError, ValueError) as error:
        came = "an empty file" if not isinstance(error, OSError) and _is_empty(path) else str(error)
        raise damaged(path, "JSON", came, remedy) from error


def _content(path: Path) -> bytes:
    """Return the content of a regular file. Opening anything else, such as a pipe, might block
    forever.
    """
    if not path.is_file():
        raise OSError("a folder" if path.is_dir() else "no regular file")
    return path.read_bytes()


def _is_empty(path: Path) -> bool:
    """Return whether a file has no bytes."""
    return path.stat().st_size == 0


class DamagedError(VarregError):
    """A file does not have the contents that varreg wrote: it is truncated, changed, or another
    kind of file.
    """


def damaged(path: Path, expected: str, came: str, remedy: str) -> DamagedError:
    """Return the error that names a file, its expected and its actual contents, and what to do."""
    came = printable(came).rstrip(".")
    said = f"is not what this version of varreg writes: expected {expected}; got {came}"
    return DamagedError(f"varreg: {path} {said}. {remedy}")


def printable(text: str) -> str:
    r"""Return the text with escapes in place of characters that would control a terminal or break a
    page.

    >>> print(printable("a\x1b[31mb\ud800"))
    a\x1b[31mb\ud800
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(c: str) -> str:
    """Return a character, or its escape."""
    if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs":
        return c
    return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"


def as_saved(value: Any) -> Any:
    """Return the value as it comes back from a file."""
    return _from_json(_to_json(value))


def check_inside(folder: Path, path: Path) -> None:
    """Raise if a path leads out of a results folder, which may be someone else's."""
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise VarregError(f"varreg: {path} cannot be followed ({error}). Remove it.") from error
    if not inside:
        raise VarregError(
            f"varreg: {path} is a link that leads out of {folder}, and nothing is read or written "
            "there. Replace the link by its target, or remove it."
        )


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _to_json(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(k): _to_json(v) for k, v in value.items()}
    return [_to_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    """Return a value that JSON held."""
    if isinstance(value, dict):
        return {printable(k): _from_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    return _WORDS.get(value, printable(value)) if isinstance(value, str) else value


def write_tensors(path: Path, value: Any) -> None:
    """Write what `torch.load(weights_only=True)` reads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write(path, buffer.getvalue())


def read_tensors(path: Path, remedy: str) -> Any:
    """Return the tensors that `write_tensors` wrote. Raise a `DamagedError` that ends with the
    remedy if any bit of the file differs.

    `torch.load` does not compare checksums and would accept a flipped bit; this function compares
    them.
    """
    expected = "a whole archive of torch"
    try:
        content = _content(path)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            wrong = archive.testzip()
    except Exception as error:  # zipfile raises many kinds
        came = str(error) if path.is_file() and not _is_empty(path) else "an empty file or none"
        raise damaged(path, expected, came, remedy) from error
    if wrong is not None:
        raise damaged(path, expected, f"a wrong checksum of {wrong!r}", remedy)
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch raises many kinds
        came = f"one that torch does not load ({_first_line(error)})"
        raise damaged(path, expected, came, remedy) from error


def _first_line(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class BusyError(VarregError):
    """Another process works on the same folder."""


@contextlib.contextmanager
def alone(folder: Path, what: str, patience: float | None = None) -> Iterator[None]:
    """Lock a folder inside of the `with` block, so that no other process works on it. The lock also
    ends if the process is killed.
    """
    check_inside(folder, folder / ".lock")  # locking empties the file
    try:
        with filelock.FileLock(
            folder / ".lock", timeout=PATIENCE if patience is None else patience
        ):
            yield
    except filelock.Timeout:
        raise BusyError(
            f"varreg: another process is at work on {what}, in {folder}. Wait for it, or end it."
        ) from None


@contextlib.contextmanager
def removed_if_unused(folder: Path) -> Iterator[None]:
    """Remove a folder that is new if the `with` block raises and has put nothing but a lock in it:
    what was refused leaves no folder behind.
    """
    is_new = not folder.exists()
    try:
        yield
    except BaseException:
        if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock"}:
            (folder / ".lock").unlink(missing_ok=True)
            folder.rmdir()
        raise


def sweep(folder: Path) -> None:
    """Remove temporary files that a killed process left."""
    for left in folder.glob(".*.*"):
        left.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Raise a VarregError if results cannot be written to a folder, before hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise VarregError(
            f"varreg: results cannot be written to {folder}: {error.strerror or error}."
        ) from error
