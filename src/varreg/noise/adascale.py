"""`AdaScale`: train at another batch size without tuning the learning rate again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from varreg._torch import disable_dynamo
from varreg.engine.cleared import is_zero
from varreg.engine.parameters import LEDGERS
from varreg.errors import MeasurementError, VarregError
from varreg.noise import measure
from varreg.noise.scalable import check, power_of
from varreg.optim.parameter_names import names
from varreg.shards import local
from varreg.thresholds import SMOOTHING


def gain_of(trace: float, signal: float, scale: float, base_batch: int) -> float:
    """Return the gain r = (tr Σ/B₀ + |G|²)/(tr Σ/(S·B₀) + |G|²): one step of the batch S·B₀ is
    worth r steps of the base batch B₀. It is 1 without noise, S if there is only noise, and
    otherwise in between.

    >>> gain_of(trace=32.0, signal=1.0, scale=4.0, base_batch=32)
    1.6
    """
    noise, signal = max(trace, 0.0) / base_batch, max(signal, 0.0)
    if not noise + signal > 0:
        return 1.0
    return min(max((noise + signal) / (noise / scale + signal), 1.0), scale)


class AdaScale:
    """AdaScale (Johnson et al. 2020) around an optimizer that was tuned at a batch of `base_batch`,
    for a batch of m = S·`base_batch` samples, on one device or many.

    The gain of a step is

        r = (tr Σ/B₀ + |G|²)/(tr Σ/(S·B₀) + |G|²),   1 ≤ r ≤ S

    from running averages of tr Σ and |Ĝ|² = |ḡ|² − tr Σ/m over the optimizer's parameters. The step
    uses the learning rate r·lr, and counts as r steps of the base: `progress`, τ, is the sum of all
    gains. Training ends when τ reaches the number of steps of the base, and the learning rate
    follows its schedule at ⌊τ⌋. If r is below S, training takes more samples than the base, and
    still fewer steps.

    S may change from step to step. Parameters must be observed (`varreg.observe`). Call
    `ada.step()` in place of `optimizer.step()`. Create schedulers with the optimizer itself, and
    call `ada.advance(scheduler)` in place of `scheduler.step()`:

    >>> import torch, varreg
    >>> model = torch.nn.Linear(3, 1)
    >>> observer = varreg.observe(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # tuned at a batch of 8
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    >>> ada = varreg.AdaScale(optimizer, base_batch=8)
    >>> while ada.progress < 100:
    ...     optimizer.zero_grad()
    ...     model(1 + torch.randn(64, 3)).square().mean().backward()
    ...     ada.step()
    ...     ada.advance(scheduler)
    >>> 1 < ada.gain < 8
    True

    Args:
        optimizer: Any torch optimizer with a learning rate, ours included.
        base_batch: B₀, the batch size for which learning rate and schedule were chosen.
        power: The learning rate is multiplied by r to this power. None means 1 for SGD, and 0.5 for
            Adam and similar optimizers. For a class that is neither torch's nor derived from
            torch's, `power` is required. Only 1 is AdaScale. For Adam, expect no more than from the
            square-root rule.
        smoothing: The weight of the old averages at each step.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_batch: int,
        *,
        power: float | None = None,
        smoothing: float = SMOOTHING,
    ):
        check(optimizer, base_batch, power, smoothing)
        self.optimizer, self.base_batch, self.smoothing = optimizer, base_batch, smoothing
        self.power = power_of(optimizer) if power is None else power
        self.gain = math.nan
        """r of the last step."""
        self.progress = 0.0
        """τ: the sum of all gains so far, in steps of the base batch."""
        self._ticks = 0  # number of steps of the schedule
        self._trace = self._signal = self._weight = 0.0  # running averages, and their weight

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's param groups: a GradScaler reads them."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    @disable_dynamo  # it runs eagerly, even inside a compiled training step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer, with the learning rate multiplied by gain**power. Restore
        the learning rate after the step.

        If a `closure` is given, it runs first: it computes the loss and its gradients. Return its
        loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gain = self._measure()
        with _scaled(self.optimizer, gain**self.power):
            self.optimizer.step()
        self.gain = gain
        self.progress += gain
        return loss

    def advance(self, *schedulers: Any) -> None:
        """Advance learning-rate schedulers of torch to ⌊τ⌋. Call it after each `step()`, in place
        of `scheduler.step()`. The schedulers must count steps, not epochs.
        """
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau) or not hasattr(scheduler, "step"):
                raise VarregError(
                    "varreg: AdaScale.advance expects schedulers that follow a number of steps, "
                    f"got {type(scheduler).__name__}. Call its step() yourself."
                )
        while self._ticks < math.floor(self.progress):
            self._ticks += 1
            for scheduler in schedulers:
                scheduler.step()

    def _measure(self) -> float:
        """Update the averages with the current moments, and return the gain of the next step."""
        found = _measured(self.optimizer)
        m = measure.samples(found)
        if m < self.base_batch:
            raise VarregError(
                f"varreg: AdaScale got a batch of {m} samples, below base_batch={self.base_batch}: "
                "it only scales up. Drop incomplete batches (drop_last=True), or accumulate more."
            )
        scale = m / self.base_batch
        if measure.has_variance(found):
            rows = measure.numbers(found)
            if rows is None:
                rows = measure.estimates(found).tolist()
            trace, signal = map(sum, zip(*rows, strict=True))
            if math.isfinite(trace) and math.isfinite(signal):  # else the averages stay
                old = self.smoothing
                self._trace = old * self._trace + (1 - old) * trace
                self._signal = old * self._signal + (1 - old) * signal
                self._weight = old * self._weight + (1 - old)
        elif scale > 1:
            raise MeasurementError(
                "varreg: AdaScale needs the variance of at least two groups, and groups=1 has one. "
                "Observe the model with more groups, or without groups."
            )
        # both averages have the same weight, which cancels in the gain
        return gain_of(self._trace, self._signal, scale, self.base_batch)

    _STATE = ("gain", "progress", "_ticks", "_trace", "_signal", "_weight")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Optimizer and schedulers have their own state."""
        state = {name.lstrip("_"): getattr(self, name) for name in self._STATE}
        return {"base_batch": self.base_batch, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Its `base_batch` must be the same."""
        names = [name.lstrip("_") for name in self._STATE]
        values = [state.get(n) for n in ("base_batch", *names)] if isinstance(state, dict) else []
        is_valid = values and all(isinstance(value, (int, float)) for value in values)
        # the gain is nan before the first step
        if not is_valid or not all(math.isfinite(state[n]) for n in names if n != "gain"):
            raise VarregError(
                "varreg: AdaScale.load_state_dict expects the result of its state_dict(), with "
                f"base_batch, {', '.join(names)}; got {type(state).__name__} {state!r:.100}."
            )
        if state["base_batch"] != self.base_batch:
            raise VarregError(
                f"varreg: the checkpoint's AdaScale has base_batch={state['base_batch']}, this one "
                f"{self.base_batch}: progress counts steps of the base batch. Use the same."
            )
        for name in self._STATE:
            setattr(self, name, state[name.lstrip("_")])

    def __repr__(self) -> str:
        return (
            f"AdaScale({type(self.optimizer).__name__}, base_batch={self.base_batch}, "
            f"gain={self.gain:.3g}, progress={self.progress:.6g})"
        )


@contextlib.contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply all learning rates inside of the `with` block, and restore the objects after it."""
    before = [(group, group["lr"]) for group in optimizer.param_groups]
    try:
        if factor != 1.0:
            for group, lr in before:
                group["lr"] = lr * factor
        yield
    finally:
        for group, lr in before:
            group["lr"] = lr


def _measured(optimizer: Optimizer) -> list[measure.Measured]:
    """Return the moments of the optimizer's parameters. Raise a MeasurementError if a parameter has
    a gradient but no moments.
    """
    with_gradient = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and p.numel()
    ]
    found = measure.read([(p, ledger) for p in with_gradient if (ledger := LEDGERS.get(p))])
    measured = {id(f.parameter) for f in found if f.moments is not None}
    missing = [p for p in with_gradient if id(p) not in measured and not is_zero(local(p.grad))]
    if missing or not measured:
        which = ", ".join(names(optimizer)[p] for p in missing) or "all of them"
        raise MeasurementError(
            "varreg: AdaScale needs the moments of all parameters that have a gradient. These have "
            f"none: {which}. Call varreg.observe(model) before the forward pass, and step() after "
            "backward(), before gradients are cleared."
        )
    return found
