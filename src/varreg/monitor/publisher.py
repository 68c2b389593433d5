"""Write the journal and the page of a monitor."""

from __future__ import annotations

import html as escaping
import os
import platform
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch

from varreg.monitor import live_page
from varreg.monitor.journal import FORMAT, Journal, data_path, page_path
from varreg.monitor.measured_step import Numbers
from varreg.monitor.recording import Recorder
from varreg.thresholds import PAGE_SECONDS, PAGE_SHARE

_OPEN: dict[Path, Publisher] = {}


class Publisher:
    """Appends records to the journal at once, and writes the page from time to time. It holds no
    reference to the model, so that the model can be freed before it.

    If the disk is full, it warns once, and training continues.
    """

    def __init__(self, path: Path, resume: bool):
        self.page = page_path(path)
        self._key = data_path(path).absolute()
        if (other := _OPEN.get(self._key)) is not None:
            other.end("ended")  # a notebook ran its cell again
        self.journal = Journal(data_path(path), resume=resume)
        _OPEN[self._key] = self
        self.status: dict[str, Any] = {}
        self.handle: Any = None
        """The handle of the display in a notebook."""
        self._id, self._process = "", os.getpid()
        self._next = 0.0  # when the page is written again
        self._refresh = PAGE_SECONDS
        self._warned = False

    @property
    def is_open(self) -> bool:
        """Return whether it still writes: it has not ended, and no other took its place."""
        return _OPEN.get(self._key) is self

    def start(self, recorder: Recorder, title: str | None) -> None:
        """Begin a session."""
        self._id = uuid.uuid4().hex[:8]
        model, optimizer = recorder.observer.model, recorder.optimizer
        about = {
            "format": FORMAT,
            "id": self._id,
            "after": recorder.steps,
            "time": round(time.time(), 2),
            "title": title or type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "optimizer": type(getattr(optimizer, "base", optimizer)).__name__ if optimizer else "",
            "groups": recorder.observer.groups,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self.journal.append({"session": about})
        self.publish()

    def record(self, values: Numbers, layers: list[str]) -> None:
        """Append a record, and write the page if it is due."""
        try:
            if layers != self.journal.log.layers and "noise_layers" in values:
                self.journal.append({"layers": layers})
            self.journal.append(values)
        except OSError as error:
            self._warn(error)
        if time.perf_counter() >= self._next:
            self.publish()

    def publish(self) -> None:
        """Write the page, and plan the next one, so that pages take a small share of the time."""
        began = time.perf_counter()
        running = self.journal.log.end is None
        status = {"written": round(time.time(), 2), **self.status}
        if running:
            status["refresh"] = self._refresh
        try:
            live_page.write(self.page, live_page.html(self.journal.log, status))
        except OSError as error:
            self._warn(error)
        if self.handle is not None:
            self.handle.update(_Frame(self.frame()))
        now = time.perf_counter()
        self._refresh = max(PAGE_SECONDS, (now - began) / PAGE_SHARE)
        self._next = now + self._refresh

    def frame(self) -> str:
        """Return the current page in a frame, for a notebook."""
        status = {"written": round(time.time(), 2), **self.status}
        text = escaping.escape(live_page.html(self.journal.log, status), quote=True)
        style = "width:100%;height:720px;border:0"
        return f'<iframe title="varreg monitor" srcdoc="{text}" style="{style}"></iframe>'

    def end(self, reason: str) -> None:
        """End the session."""
        if not self.is_open or os.getpid() != self._process:
            return  # another monitor replaced it, or this process is a fork
        del _OPEN[self._key]
        try:
            self.journal.append({"end": reason, "id": self._id, "time": round(time.time(), 2)})
        except OSError as error:
            self._warn(error)
        self.publish()
        self.journal.close()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"varreg: the monitor cannot write ({error}); training continues without it. The "
                "records before are complete.",
                stacklevel=2,
            )


class _Frame:
    """The display in a notebook."""

    def __init__(self, text: str):
        self._text = text

    def _repr_html_(self) -> str:
        return self._text
