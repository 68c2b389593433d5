"""A model with its optimizer, as `varreg bench` trains it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import varreg
from varreg.lab import optimizers, specs
from varreg.lab.bench import timing
from varreg.lab.bench.plan import PLAIN, base_of, groups_of
from varreg.lab.bench.timing import Parts
from varreg.lab.bench.workloads import Workload, built, call

LR = 1e-6
"""So small that the model stays where it is: every round has the same work, with numbers of an
ordinary size.
"""


class Training:
    """A model with its optimizer: a training step in three phases."""

    def __init__(self, w: Workload, spec: str, arm: str):
        model, self.x, self.y = built(w)
        self.model, self.loss_of, self.loss = model.train(), w.loss, torch.zeros(())
        self.observer = None if arm == PLAIN else varreg.observe(model, groups_of(arm))
        name, options = base_of(spec) if arm == PLAIN else specs.parse(spec)
        self.optimizer = optimizers.build(name, model.parameters(), LR, options)
        self.on_cpu = all(p.is_cpu for p in model.parameters())

    def forward(self) -> None:
        """Clear gradients and compute the loss."""
        self.optimizer.zero_grad()
        self.loss = self.loss_of(call(self.model, self.x), self.y)
        self._wait()

    def backward(self) -> None:
        """Compute gradients, and moments where the model is observed."""
        self.loss.backward()
        self._wait()

    def step(self) -> None:
        """Let the optimizer step."""
        self.optimizer.step()
        self._wait()

    def timed(self) -> Callable[[], Parts]:
        """Return a step that returns the seconds of its three phases."""
        return timing.timed(self.forward, self.backward, self.step)

    def _wait(self) -> None:
        """Wait for what a device has been given to do."""
        if not self.on_cpu:
            torch.accelerator.synchronize()
