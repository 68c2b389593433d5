"""Early stopping: the parameters of the lowest validation loss so far."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn


class Best:
    """The lowest validation loss so far, and the parameters of that evaluation."""

    def __init__(self) -> None:
        self.loss, self.step = math.inf, 0
        self.parameters: dict[str, Tensor] = {}

    def see(self, loss: float, step: int, model: nn.Module) -> None:
        """Keep a model's parameters if their validation loss is the lowest so far."""
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.parameters = {name: t.clone() for name, t in model.state_dict().items()}

    def put_back(self, model: nn.Module) -> None:
        """Set a model to the stored parameters, if there are any."""
        if self.parameters:
            model.load_state_dict(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"loss": self.loss, "step": self.step, "parameters": self.parameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.loss, self.step = float(state["loss"]), int(state["step"])
        self.parameters = dict(state["parameters"])
