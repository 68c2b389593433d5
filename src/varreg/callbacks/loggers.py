"""Loggers for your own training loop: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import abc
import importlib
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from varreg.engine.observer import Observer
from varreg.errors import VarregError
from varreg.monitor.measured_step import Numbers, scalars
from varreg.monitor.recording import Recorder
from varreg.thresholds import WINDOW


class Logger(abc.ABC):
    """The abstract base class of loggers. A logger logs the numbers that a `varreg.Monitor`
    records.

    Call `step(loss)` after `optimizer.step()`, before gradients are cleared. Or use a `with` block,
    in which the logger follows the optimizer by itself, and `step(loss)` only adds the loss.

    Args:
        observer: The observer that `varreg.observe` returned.
        optimizer: Any torch optimizer; for one of varreg's, λ is logged.
        every: Log every `every`-th step. None: as often as 1 % of the time allows.
        prefix: The beginning of all names.
        layers: Log noise scale and signal-to-noise ratio of every layer, too.
        window: The number of records over which the noise scale is averaged.

    """

    def __init__(
        self,
        observer: Observer,
        optimizer: Any,
        *,
        every: int | None = None,
        prefix: str = "varreg/",
        layers: bool = False,
        window: int = WINDOW,
    ):
        if not isinstance(prefix, str):
            raise VarregError(f"varreg: prefix must be a string; got {prefix!r}.")
        self.prefix = prefix
        self.recorder = Recorder(
            observer, optimizer, self._take, every=every, layers=layers, window=window
        )

    def step(self, loss: float | Tensor | None = None) -> None:
        """Count a step, and log it if a record is due. A loss tensor is read only in that case."""
        self.recorder.step(loss)

    def close(self) -> None:
        """Log the last step, and stop following the optimizer."""
        self.recorder.detach()

    def __enter__(self) -> Any:
        self.recorder.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, values: Numbers) -> None:
        self._log(scalars(values, self.recorder.layer_names, self.prefix), values["step"])

    @abc.abstractmethod
    def _log(self, values: dict[str, float], step: int) -> None:
        """Log finite numbers."""


class Writer(Protocol):
    """The interface of a writer, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TensorBoard(Logger):
    """Logs to TensorBoard.

    >>> import torch, varreg
    >>> class Printer:
    ...     def add_scalar(self, tag, value, step):
    ...         print(step, tag, round(value, 3))
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> observer = varreg.observe(model)
    >>> log = varreg.callbacks.TensorBoard(observer, None, Printer())
    >>> model(torch.tensor([[1.0], [3.0]])).mean().backward()  # gradients 1 and 3
    >>> log.step(loss=2.5)
    1 varreg/batch 2.0
    1 varreg/grad_norm 2.0
    1 varreg/grad_error 1.0
    1 varreg/snr 2.0
    1 varreg/norm_test 0.5
    1 varreg/gsnr 2.0
    1 varreg/evidence -3.0
    1 varreg/noise_scale 0.667
    1 varreg/noise_scale_low 0.0
    1 varreg/noise_layers 0.0
    1 varreg/signal_layers 0.0
    1 varreg/loss 2.5
    """

    def __init__(self, observer: Observer, optimizer: Any, writer: Writer, **options: Any):
        """Take what `Logger` takes, and a writer.

        Args:
            observer: The observer that `varreg.observe` returned.
            optimizer: Any torch optimizer; for one of varreg's, λ is logged.
            writer: A `SummaryWriter`, or any object with its `add_scalar`.
            options: `every`, `prefix`, `layers` and `window`, as `Logger` has them.

        """
        if not hasattr(writer, "add_scalar"):
            raise VarregError(
                "varreg: TensorBoard expects a writer with add_scalar(tag, value, step), as "
                f"torch.utils.tensorboard.SummaryWriter; got {type(writer).__name__}."
            )
        self.writer = writer
        super().__init__(observer, optimizer, **options)

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)


def imported(name: str) -> Any:
    """Return a module that varreg does not install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the module itself misses another one
            raise
        raise ImportError(f"varreg: this logger needs {name}: pip install {name}.") from error


class WandB(Logger):
    """Logs to a run of Weights & Biases. The axis of its numbers is the optimizer's steps."""

    def __init__(self, observer: Observer, optimizer: Any, run: Any = None, **options: Any):
        """Take what `Logger` takes, and a run.

        Args:
            observer: The observer that `varreg.observe` returned.
            optimizer: Any torch optimizer; for one of varreg's, λ is logged.
            run: What `wandb.init()` returned. None: the active run.
            options: `every`, `prefix`, `layers` and `window`, as `Logger` has them.

        """
        self.run: Any = imported("wandb").run if run is None else run
        if self.run is None:
            raise VarregError(
                "varreg: WandB found no active run. Call wandb.init() first, or pass run=."
            )
        if not hasattr(self.run, "define_metric"):
            raise VarregError(
                f"varreg: WandB expects what wandb.init() returned; got {type(self.run).__name__}."
            )
        super().__init__(observer, optimizer, **options)
        self.run.define_metric(f"{self.prefix}step", hidden=True)
        self.run.define_metric(f"{self.prefix}*", step_metric=f"{self.prefix}step")

    def _log(self, values: dict[str, float], step: int) -> None:
        self.run.log({**values, f"{self.prefix}step": step})


class MLflow(Logger):
    """Logs to a run of MLflow."""

    def __init__(
        self, observer: Observer, optimizer: Any, run_id: str | None = None, **options: Any
    ):
        """Take what `Logger` takes, and the id of a run.

        Args:
            observer: The observer that `varreg.observe` returned.
            optimizer: Any torch optimizer; for one of varreg's, λ is logged.
            run_id: The id of a run. None: the active run.
            options: `every`, `prefix`, `layers` and `window`, as `Logger` has them.

        """
        mlflow = imported("mlflow")
        if run_id is None and mlflow.active_run() is None:
            raise VarregError(
                "varreg: MLflow found no active run. Call mlflow.start_run() first, or pass "
                "run_id=."
            )
        self.run_id = mlflow.active_run().info.run_id if run_id is None else run_id
        super().__init__(observer, optimizer, **options)

    def _log(self, values: dict[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics(values, step=step, run_id=self.run_id)
