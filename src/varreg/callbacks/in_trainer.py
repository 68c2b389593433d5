"""A callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

import os
from typing import Any

import transformers

from varreg.callbacks.follower import Follower


class TrainerCallback(transformers.TrainerCallback):
    """Observes the model while `train()` runs, adds its numbers to the Trainer's log, and detaches
    at the end.

    It works with any optimizer; for one of varreg's, it logs λ. It measures the steps that the
    Trainer logs. The log is `trainer.state.log_history`, and the printed output. The Trainer writes
    its own reports (`report_to`) before it calls other callbacks. To have the numbers in these
    reports, too, use `add_to(trainer)` in place of `callbacks=[…]`.

    Args:
        path: Also write the page of a `varreg.Monitor` there.
        every: Measure every `every`-th step. None: as often as the Trainer logs.
        prefix: The beginning of all names.
        layers: Log every layer, too.
        options: Options of `varreg.observe`, such as `groups=8`.

    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        prefix: str = "varreg/",
        layers: bool = False,
        **options: Any,
    ):
        self.follower = Follower(path, every=every, prefix=prefix, layers=layers, **options)
        self._latest: dict[str, float] = {}

    def add_to(self, trainer: transformers.Trainer) -> TrainerCallback:
        """Add this callback before the Trainer's others, so that its reports have the numbers."""
        trainer.callback_handler.callbacks.insert(0, self)
        self.follower.observe(trainer.model)
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Observe, before the Trainer wraps the model."""
        self.follower.observe(others["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Follow the optimizer; observe the model, if it is not observed."""
        self.follower.observe(others["model"])
        every = int(state.logging_steps) if args.logging_strategy == "steps" else None
        self.follower.start(others["optimizer"], self._keep, steps=state.global_step, every=every)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the last measured numbers to the log."""
        logs = others["logs"]
        if self.follower.recorder is not None:
            self.follower.recorder.step(logs.get("loss"))
        if "loss" in logs and self._latest:
            mine = {name: x for name, x in self._latest.items() if name not in logs}
            logs.update(mine)
            state.log_history[-1].update(mine)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Detach from the model."""
        self.follower.stop()

    def _keep(self, values: dict[str, float], step: int) -> None:
        self._latest = values
