"""The shared part of all callbacks: observe a model, follow its optimizer, and detach from both."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from varreg.engine.observer import Observer, observe
from varreg.monitor.measured_step import Numbers, scalars
from varreg.monitor.monitor import Monitor
from varreg.monitor.recording import Recorder
from varreg.thresholds import WINDOW

Log = Callable[[dict[str, float], int], None]
"""A function that receives finite numbers by name, and their step."""


class Follower:
    """Observes a model, records steps of its optimizer, and detaches from both."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        prefix: str = "varreg/",
        layers: bool = False,
        window: int = WINDOW,
        **options: Any,
    ):
        self.path, self.every, self.prefix, self.options = path, every, prefix, options
        self.how: dict[str, Any] = {"layers": layers, "window": window}
        self.observer: Observer | None = None
        self.monitor: Monitor | None = None
        self.recorder: Recorder | None = None
        self.state: dict[str, Any] | None = None
        """The state of the recorder, from a checkpoint or from the end of the last training."""

    def observe(self, model: nn.Module) -> None:
        """Observe a model. If another model was observed before, stop observing it."""
        if self.observer is not None and self.observer.is_on:
            if self.observer.model is model:
                return
            self.observer.remove()
        self.observer = observe(model, **self.options)

    def start(
        self, optimizer: Any, log: Log, *, steps: int | None = None, every: int | None = None
    ) -> None:
        """Follow an optimizer that has taken `steps` steps, and pass each record to `log`."""
        assert self.observer is not None
        every = self.every if self.every is not None else every
        if self.path is None:
            self.recorder = Recorder(
                self.observer, optimizer, lambda values: None, every=every, **self.how
            )
        else:
            self.monitor = Monitor(self.observer, optimizer, self.path, every=every, **self.how)
            self.recorder = self.monitor.recorder
        recorder, write = self.recorder, self.recorder.sink

        def take(values: Numbers) -> None:
            write(values)
            log(scalars(values, recorder.layer_names, self.prefix), values["step"])

        recorder.sink = take
        state = {**(self.state or {}), **({} if steps is None else {"steps": steps})}
        if state:
            (self.monitor or recorder).load_state_dict(state)
        recorder.attach()

    def stop(self, reason: str = "ended") -> None:
        """Stop following and observing. A second call does nothing."""
        if self.recorder is not None:
            self.recorder.detach()
            self.state = self.recorder.state_dict()
        if self.monitor is not None:
            self.monitor.close(reason)
        if self.observer is not None:
            self.observer.remove()
        self.observer = self.monitor = self.recorder = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.recorder.state_dict() if self.recorder is not None else self.state or {}
