"""A tracker for Hugging Face Accelerate."""

from __future__ import annotations

import os
from typing import Any

from accelerate.tracking import GeneralTracker
from torch import nn

from varreg.callbacks.follower import Follower


class AccelerateTracker(GeneralTracker):
    """Observes a model, follows its optimizer, and adds the measured numbers to the log.

    Create it before `prepare()`, and pass it to the `Accelerator` as the first of `log_with`:

        tracker = varreg.callbacks.AccelerateTracker(model, optimizer)
        accelerator = Accelerator(log_with=[tracker, "tensorboard"], project_dir="runs")
        accelerator.init_trackers("mine")

    Each `accelerator.log({"loss": loss}, step)` then also logs the last measured numbers, to all
    trackers after this one. `accelerator.end_training()` detaches it.

    Args:
        model: The model, before `prepare()`.
        optimizer: Any torch optimizer; for one of varreg's, λ is logged.
        path: Also write the page of a `varreg.Monitor` there.
        every: Measure every `every`-th step. None: as often as 1 % of the time allows.
        prefix: The beginning of all names.
        layers: Log every layer, too.
        options: Options of `varreg.observe`, such as `groups=8`.

    """

    name = "varreg"
    requires_logging_directory = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        prefix: str = "varreg/",
        layers: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.follower = Follower(path, every=every, prefix=prefix, layers=layers, **options)
        self.latest: dict[str, float] = {}
        """The last measured numbers."""
        self._optimizer = optimizer
        self.follower.observe(model)

    @property
    def tracker(self) -> Follower:
        """Return the follower, which does the work."""
        return self.follower

    def start(self) -> None:
        """Follow the optimizer: `init_trackers` calls it."""
        self.follower.start(self._optimizer, self._keep)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Add the last measured numbers to `values`, which the next trackers log."""
        if self.follower.recorder is not None:
            self.follower.recorder.step(values.get("loss"))
        values.update({name: x for name, x in self.latest.items() if name not in values})

    def finish(self) -> None:
        """Detach from the model: `end_training` calls it."""
        self.follower.stop()

    def _keep(self, values: dict[str, float], step: int) -> None:
        self.latest = values
