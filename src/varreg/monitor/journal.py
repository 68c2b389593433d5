"""The data of a monitor: a file of JSON lines. Lines are only appended.

There are four kinds of lines: `{"session": …}` when a monitor starts, `{"layers": […]}` when there
are new layers, `{"step": …}` for a record, and `{"end": …}`. A process may be killed at any moment,
so a reader drops an incomplete last line. JSON cannot represent numbers that are not finite: they
are written as the words "nan", "inf" and "-inf".
"""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varreg.errors import VarregError
from varreg.monitor.measured_step import Numbers
from varreg.thresholds import PAGE_BYTES, PAGE_LINES

FORMAT = 1
_BEGIN = f'{{"session":{{"format":{FORMAT},'.encode()
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass
class Log:
    """The contents of a file."""

    sessions: list[dict[str, Any]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The records, as lines of JSON."""
    end: dict[str, Any] | None = None
    """How the last session ended; None while it runs, or if it was killed."""
    most: int | None = None
    """The largest number of records in memory. They are evenly spaced and include the last one.
    None: all records.
    """
    _count: int = 0
    _stride: int = 1

    @property
    def records(self) -> list[Numbers]:
        """Return the records, oldest first."""
        return [_with_numbers(json.loads(line)) for line in self.lines]

    @property
    def steps(self) -> int:
        """Return the step of the last record."""
        return int(json.loads(self.lines[-1])["step"]) if self.lines else 0

    def add(self, line: str) -> None:
        """Add one line of the file."""
        entry = json.loads(line)
        if "step" in entry and "end" not in entry:
            self._add_record(line)
        elif "layers" in entry:
            self.layers = entry["layers"]
        elif "session" in entry:
            self.sessions.append(entry["session"])
            self.end = None
            # a run that continues from a checkpoint drops the records after it
            after = entry["session"]["after"]
            while self.lines and json.loads(self.lines[-1])["step"] > after:
                self.lines.pop()
                self._count = (len(self.lines) - 1) * self._stride + 1
        elif "end" in entry and self.sessions and entry["id"] == self.sessions[-1]["id"]:
            self.end = entry

    def _add_record(self, line: str) -> None:
        """Add a record; if there are too many, drop every second one."""
        # line k is record k·stride, except the last line, which the next record may replace
        if self.lines and (self._count - 1) % self._stride:
            self.lines.pop()
        self.lines.append(line)
        self._count += 1
        if self.most is not None and (
            len(self.lines) > self.most or sum(map(len, self.lines)) > PAGE_BYTES
        ):
            self._stride *= 2
            self.lines = [*self.lines[:-1:2], line]


class Journal:
    """A file to which each line is appended by one write."""

    def __init__(self, path: Path, *, resume: bool = True):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise VarregError(
                f"varreg: a Monitor cannot write to {path} ({error.strerror}). Choose a folder in "
                "which you may write."
            ) from error
        try:
            if not resume:
                os.ftruncate(self._file, 0)
            self.log, end = _parse(path, PAGE_LINES)
            os.ftruncate(self._file, end)  # drop an incomplete last line
        except BaseException:
            self.close()
            raise

    def append(self, entry: dict[str, Any]) -> str:
        """Append a line completely or not at all, and return it."""
        line = json.dumps(_with_words(entry), ensure_ascii=False, separators=(",", ":"))
        content, before = f"{line}\n".encode(), os.fstat(self._file).st_size
        try:
            if os.write(self._file, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except BaseException:
            os.ftruncate(self._file, before)
            raise
        self.log.add(line)
        return line

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: str | os.PathLike[str]) -> Log:
    """Return the contents of a monitor's file.

    Args:
        path: The monitor's path, or that of its file.

    Returns:
        A log: `log.records` has the numbers of every record, `log.layers` the names of layers.

    """
    if not isinstance(path, (str, os.PathLike)):
        raise VarregError(
            f"varreg: read expects the path of a Monitor, or of its file; got {path!r:.60}."
        )
    return _parse(data_path(Path(path)))[0]


def data_path(path: Path) -> Path:
    """Return the path of a monitor's data: beside its page, or in its folder."""
    if path.suffix == ".jsonl":
        return path
    return path.with_suffix(".jsonl") if is_page(path) else path / "monitor.jsonl"


def page_path(path: Path) -> Path:
    """Return the path of a monitor's page."""
    return path if is_page(path) else path / "monitor.html"


def is_page(path: Path) -> bool:
    """Return whether a path is that of a page, and not of a folder."""
    return path.suffix in (".html", ".htm")


def _parse(path: Path, most: int | None = None) -> tuple[Log, int]:
    """Return the contents of a file, and the position of the end of its last complete line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        said = f"there is no {path}" if missing else f"cannot read {path} ({error.strerror})"
        raise VarregError(f"varreg: {said}. Use the same path as for the Monitor.") from error
    log, end = Log(most=most), content.rfind(b"\n") + 1
    lines = content[:end].splitlines() or [content][: len(content)]
    number, line = 0, b""
    try:
        for number, line in enumerate(lines, 1):
            if number == 1 and not line.startswith(_BEGIN[: len(line)]):
                raise ValueError("another kind of file")
            if end:
                log.add(line.decode())
    except (ValueError, KeyError, TypeError) as error:
        raise VarregError(
            f"varreg: line {number} of {path} was not written by a Monitor: {line!r:.60}. Choose "
            "another path, or delete the data with Monitor(..., resume=False)."
        ) from error
    return log, end


def _with_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_words(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_with_words(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_with_numbers(x) for x in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value
