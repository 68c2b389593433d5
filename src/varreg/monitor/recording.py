"""`Recorder`: measures some steps of a training. Each monitor and each logger has one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from varreg._torch import disable_dynamo
from varreg.engine.observer import Observer
from varreg.errors import MeasurementError, VarregError
from varreg.monitor import measured_step
from varreg.monitor.measured_step import Numbers
from varreg.monitor.pace import Pace
from varreg.noise.noise_scale import NoiseScale
from varreg.optim.base import Regularized
from varreg.shards import is_sharded
from varreg.thresholds import WINDOW

Sink = Callable[[Numbers], None]
"""A function that receives the numbers of one step."""


class Recorder:
    """Measures some steps, and passes their numbers to a sink.

    `step(loss)` counts a step, after `optimizer.step()` and before gradients are cleared. Between
    `attach()` and `detach()`, the recorder counts the optimizer's own steps, and `step(loss)` only
    adds the loss.

    With several processes, rank 0 records. If parameters are sharded, all ranks measure, at the
    same steps.
    """

    def __init__(
        self,
        observer: Observer,
        optimizer: Any,
        sink: Sink,
        *,
        every: int | None = None,
        layers: bool = False,
        window: int = WINDOW,
    ):
        if not isinstance(observer, Observer):
            raise VarregError(
                "varreg: a monitor expects the observer that varreg.observe(model) returns, got "
                f"{type(observer).__name__}."
            )
        if not isinstance(layers, bool):
            raise VarregError(f"varreg: layers must be True or False; got {layers!r:.60}.")
        self.noise = NoiseScale(observer, window=window)
        self.observer, self.optimizer, self.sink = observer, unwrapped(optimizer), sink
        self.layers, self.pace = layers, Pace(every)
        self.steps = 0
        """The number of steps so far."""
        self._pending: Numbers | None = None  # the measured step, whose loss may still follow
        self._cost = 0.0  # the seconds that its measurement took
        self._hook: RemovableHandle | None = None

    @property
    def layer_names(self) -> list[str]:
        """Return the layers, in the order in which they are recorded."""
        return [r.name for r in self.noise.layers] if self.noise.updates else []

    def attach(self) -> None:
        """Begin to count the optimizer's steps."""
        if self._hook is None and self.optimizer is not None:
            self._hook = self.optimizer.register_step_post_hook(lambda *_: self._count())

    def detach(self) -> None:
        """Pass on the last measured step, and stop counting the optimizer's steps."""
        self._flush(None)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def step(self, loss: float | Tensor | None = None) -> None:
        """Count a step, and record it if a record is due. `loss` is read only in that case."""
        if self._hook is None:
            self._count()
        if self._pending is not None:
            self._flush(loss)

    def _flush(self, loss: float | Tensor | None) -> None:
        """Pass the measured step to the sink."""
        found, self._pending = self._pending, None
        if found is None:
            return
        began = time.perf_counter()
        known = (found.get("lr"), found.get("grad_error"), found.get("batch", 0))
        found |= measured_step.of_loss(_number(loss), *known)
        if rank() == 0:
            self.sink(measured_step.rounded(found))
        pause = self.pace.rest(found["step"], self._cost + time.perf_counter() - began)
        if self._together:
            self.pace.agree(found["step"] + _of_rank_0(pause))

    @disable_dynamo  # it runs eagerly, even inside a compiled training step
    def _count(self) -> None:
        """Count a step, and measure it if a record is due."""
        if self._pending is not None:
            self._flush(None)
        self.steps += 1
        if self.pace.is_due(self.steps) and (not rank() or self._together):
            self._measure()

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure this step. Its loss may still follow."""
        began, before = time.perf_counter(), self.noise.updates
        try:
            self.noise.update()
        except VarregError as error:
            if not self.observer.is_on or isinstance(error, MeasurementError):
                raise
            raise VarregError(
                f"{error} Call a monitor's step() after optimizer.step() and before zero_grad(); "
                "or use `with`, in which the monitor follows the optimizer by itself."
            ) from error
        found: Numbers = {"step": self.steps, "time": round(time.time(), 2)}
        found |= measured_step.of_step(self.optimizer)
        if self.noise.updates > before:  # a batch of one sample is left out
            found |= measured_step.of_noise(self.observer, self.noise, self.layers)
        self._pending, self._cost = found, time.perf_counter() - began

    @property
    def _together(self) -> bool:
        """Return whether all processes must measure at the same steps."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return several and any(is_sharded(p) for p, _ in self.observer.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"steps": self.steps, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if not isinstance(state, dict) or not isinstance(state.get("steps"), int):
            raise VarregError(
                "varreg: load_state_dict expects the result of state_dict(), with steps and noise; "
                f"got {type(state).__name__} {state!r:.100}."
            )
        if "noise" in state:
            self.noise.load_state_dict(state["noise"])
        self.steps, self._pending = state["steps"], None


def unwrapped(optimizer: Any) -> Optimizer | None:
    """Return the optimizer that takes the step, without the wrapper of a framework or AdaScale."""
    inner = optimizer
    while not isinstance(inner, Regularized) and isinstance(
        getattr(inner, "optimizer", None), Optimizer
    ):
        inner = inner.optimizer
    if inner is not None and not isinstance(inner, Optimizer):
        raise VarregError(
            "varreg: a monitor expects a torch.optim.Optimizer, or None if there is none; got "
            f"{type(optimizer).__name__}."
        )
    return inner


def rank() -> int:
    """Return the rank of this process; 0 if there is only one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def _of_rank_0(value: int) -> int:
    """Return the value of rank 0."""
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def _number(loss: Any) -> float | None:
    """Return the loss, a tensor of one element or a number, as a float."""
    try:
        return None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise VarregError(
            "varreg: step() expects the loss, a number or a tensor of one element; got "
            f"{type(loss).__name__}{shape}."
        ) from error
