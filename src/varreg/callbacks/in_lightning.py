"""A callback for Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning
from torch import nn

from varreg.callbacks.follower import Follower
from varreg.errors import VarregError


class LightningCallback(lightning.Callback):
    """Observes the model while `fit()` runs, logs to the Trainer's loggers, and detaches at the
    end.

    It works with any optimizer; for one of varreg's, it logs λ. Lightning's checkpoints contain its
    state.

    Args:
        path: Also write the page of a `varreg.Monitor` there.
        module: The part of the LightningModule that is trained, by name ("model"). None: the
            LightningModule if it has a `forward()`, else its only part with parameters.
        every: Log every `every`-th step of the optimizer. None: as often as 1 % of the time allows.
        prefix: The beginning of all names.
        layers: Log every layer, too.
        options: Options of `varreg.observe`, such as `groups=8`.

    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        module: str | None = None,
        every: int | None = None,
        prefix: str = "varreg/",
        layers: bool = False,
        **options: Any,
    ):
        self.module = module
        self.follower = Follower(path, every=every, prefix=prefix, layers=layers, **options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Observe, before a strategy wraps the model."""
        if stage == "fit":
            self.follower.observe(trained_part(pl_module, self.module))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the first optimizer."""
        self.follower.start(
            trainer.optimizers[0],
            lambda values, step: _log(trainer.loggers, values, step),
            steps=trainer.global_step,
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss to the record of this batch's step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.follower.recorder is not None:
            self.follower.recorder.step(loss)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach: Lightning does not call `teardown` after an exception."""
        self.follower.stop(f"stopped by {type(exception).__name__}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach from the model."""
        if stage == "fit":
            self.follower.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.follower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.follower.state = state_dict or None


def _log(loggers: list[Any], values: dict[str, float], step: int) -> None:
    for logger in loggers:
        logger.log_metrics(values, step=step)


def trained_part(module: nn.Module, name: str | None) -> nn.Module:
    """Return the part of a LightningModule to observe."""
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            known = ", ".join(n for n, _ in module.named_children())
            raise VarregError(
                f"varreg: {type(module).__name__} has no part '{name}'; it has: {known}."
            ) from None
    if type(module).forward is not lightning.LightningModule.forward:
        return module
    parts = {n: m for n, m in module.named_children() if any(True for _ in m.parameters())}
    if len(parts) != 1:
        raise VarregError(
            f"varreg: {type(module).__name__} has no forward(), and {len(parts)} parts with "
            f"parameters ({', '.join(parts)}). Name the one that gets the batch, by "
            "LightningCallback(module='name'), or call them in a forward()."
        )
    return next(iter(parts.values()))
