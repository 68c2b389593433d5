"""`NoiseDecay`: a learning rate that falls as the noise scale rises. It is an experiment of the
lab; docs/evidence/noise.md has its results.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varreg.errors import VarregError
from varreg.noise.noise_scale import NoiseScale


def factor_of(noise_scale: float, start: float, batch: int, power: float) -> float:
    """Return λ = min(1, [(1 + B_n/m)/(1 + B_n(start)/m)]^−p); 0 if B_n is infinite.

    >>> factor_of(300.0, start=100.0, batch=100, power=2.0)
    0.25
    """
    if math.isinf(noise_scale):
        return 0.0
    ratio = (1 + noise_scale / batch) / (1 + start / batch)
    return math.pow(ratio, -power) if ratio > 1 else 1.0


class NoiseDecay(LRScheduler):
    """A learning-rate scheduler of torch. It multiplies the learning rate by

        λ = min(1, [(1 + B_n/m)/(1 + B_n(start)/m)]^−p)

    with B_n the noise scale from the running averages of `noise`, m the samples of its last
    update, and p the `power`. B_n(start) is the first finite B_n that is an average over a whole
    window; until then λ is 1. The number of steps need not be known in advance. Above p = 1, λ
    reinforces itself: a shorter step raises B_n.

    Call `noise.update()` after each backward pass, and `step()` after the optimizer's. Save its
    `state_dict()` beside those of the optimizer and of `noise`.

    >>> import torch, varreg
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> noise = varreg.NoiseScale(varreg.observe(model), window=20)
    >>> decay = NoiseDecay(optimizer, noise, power=2.0)
    >>> _ = torch.manual_seed(0)
    >>> for _ in range(60):
    ...     x = torch.randn(16, 3)
    ...     optimizer.zero_grad()
    ...     (model(x) - x.sum(1, keepdim=True) - torch.randn(16, 1)).square().mean().backward()
    ...     noise.update()
    ...     optimizer.step()
    ...     decay.step()
    >>> decay.get_last_lr()[0] < 0.01
    True

    Args:
        optimizer: The optimizer whose learning rates are multiplied.
        noise: The `varreg.NoiseScale` of the model that the optimizer trains, without `l1`.
        power: p, above 0.

    """

    def __init__(self, optimizer: Optimizer, noise: NoiseScale, power: float = 1.0):
        if not isinstance(optimizer, Optimizer):
            raise VarregError(
                f"varreg: NoiseDecay expects an optimizer of torch, got {type(optimizer).__name__}."
            )
        if not isinstance(noise, NoiseScale) or noise.l1:
            came = "one with l1=True" if isinstance(noise, NoiseScale) else type(noise).__name__
            raise VarregError(f"varreg: NoiseDecay expects a varreg.NoiseScale, got {came}.")
        number = isinstance(power, (int, float)) and not isinstance(power, bool)
        if not number or not 0 < power < math.inf:
            raise VarregError(
                f"varreg: NoiseDecay's power must be a number above 0; got {power!r}."
            )
        self.noise, self.power = noise, float(power)
        self.factor = 1.0
        """λ of the next step."""
        self.start = math.nan
        """B_n(start); nan until it is known."""
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next step."""
        if self.last_epoch > 0 and not self.noise.updates:
            raise VarregError(
                "varreg: NoiseDecay has no noise scale to follow: call noise.update() after "
                "backward(), before each step()."
            )
        if self.noise.updates >= self.noise.window:
            self._follow(self.noise.value)
        return [lr * self.factor for lr in self.base_lrs]

    def _follow(self, now: float) -> None:
        """Set λ from the present noise scale `now`. If B_n(start) is not known yet, set it, too."""
        if math.isnan(now):  # no update of the window has finite sums
            return
        if math.isnan(self.start) and math.isfinite(now):
            self.start = now
        if not math.isnan(self.start):
            self.factor = factor_of(now, self.start, self.noise.batch, self.power)

    _KEPT = ("power", "factor", "start", "last_epoch", "_step_count")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers."""
        lists = {"base_lrs": list(self.base_lrs), "_last_lr": list(self.get_last_lr())}
        return {**{name: getattr(self, name) for name in self._KEPT}, **lists}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint. `power` must be the same."""
        names = (*self._KEPT, "base_lrs", "_last_lr")
        if not isinstance(state_dict, dict) or not all(name in state_dict for name in names):
            raise VarregError(
                "varreg: NoiseDecay.load_state_dict expects the result of its state_dict(), with "
                f"{', '.join(names)}; got {type(state_dict).__name__} {state_dict!r:.100}."
            )
        if state_dict["power"] != self.power:
            raise VarregError(
                f"varreg: the checkpoint's NoiseDecay has power={state_dict['power']}, this one "
                f"{self.power}. Give it the same."
            )
        for name in names:
            setattr(self, name, state_dict[name])
