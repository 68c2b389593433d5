"""A model with its optimizer, for `varreg bench`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import varreg
from varreg.lab import optimizers, specs
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import PLAIN, SUMS, base_of, observed_by
from varreg.lab.bench.timing import Parts
from varreg.lab.bench.workloads import Workload, built, call

LR = 1e-6
"""A learning rate so small that the model hardly changes: every round has the same work, with
values of usual size.
"""


class Training:
    """A model with its optimizer: a training step in three phases."""

    def __init__(self, w: Workload, spec: str, arm: str):
        model, self.x, self.y = built(w)
        self.model, self.loss_of, self.loss = model.train(), w.loss, torch.zeros(())
        self.observer = None if arm == PLAIN else varreg.observe(model, **observed_by(arm))
        name, options = base_of(spec) if arm in (PLAIN, SUMS) else specs.parse(spec)
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
        """Take a step of the optimizer."""
        self.optimizer.step()
        self._wait()

    def timed(self) -> Callable[[], Parts]:
        """Return a step that returns the seconds of its three phases."""
        return timing.timed(self.forward, self.backward, self.step)

    def _wait(self) -> None:
        """Wait until the device has finished its work."""
        if not self.on_cpu:
            torch.accelerator.synchronize()
