"""`Monitor`: a page that shows a training while it runs. It takes one line in the loop."""

from __future__ import annotations

import os
import sys
import weakref
import webbrowser
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from varreg.engine.observer import Observer
from varreg.errors import VarregError
from varreg.monitor.journal import page_path, read
from varreg.monitor.measured_step import Numbers
from varreg.monitor.publisher import Publisher
from varreg.monitor.recording import Recorder, rank
from varreg.thresholds import WINDOW


class Monitor:
    """Shows a training while it runs, on one page that refreshes itself.

    The page shows loss, gradient norm, signal-to-noise ratio, gradient noise scale with its
    interval (`varreg.NoiseScale`), gauges, and the layers whose gradient is mostly noise. For
    varreg's optimizers it also shows λ.

    >>> import torch, varreg
    >>> model = torch.nn.Linear(4, 1)
    >>> observer = varreg.observe(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with varreg.Monitor(observer, optimizer, "runs/mine", every=1) as monitor:
    ...     for step in range(20):
    ...         optimizer.zero_grad()
    ...         loss = model(torch.randn(8, 4)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         monitor.step(loss)  # before gradients are cleared
    >>> monitor
    Monitor(20 steps, 20 records, ended: runs/mine/monitor.html)

    In a `with` block, the monitor follows the optimizer's steps by itself: `step(loss)` then only
    adds the loss, and is optional. Without a `with` block, call `step()` in the loop, and `close()`
    at the end; the end of the process also closes the monitor.

    Args:
        observer: The observer that `varreg.observe` returned.
        optimizer: Any torch optimizer, or None if there is none. For one of varreg's, the page
            shows λ.
        path: A folder, for `monitor.html` and its data `monitor.jsonl`; or the path of a page,
            `….html`, whose data are written beside it.
        every: Record every `every`-th step. None: as often as 1 % of the time allows; the monitor
            measures its own cost.
        layers: Also record the signal-to-noise ratio and the noise scale of every layer.
        window: The number of records in the averages of the noise scale.
        resume: True: if there are data at the path, continue after them. False: delete them.
        title: The title of the page. None: the name of the model's class.

    With several processes, rank 0 writes, with the loss that rank 0 passes to `step()`.

    """

    def __init__(
        self,
        observer: Observer,
        optimizer: Any,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        layers: bool = False,
        window: int = WINDOW,
        resume: bool = True,
        title: str | None = None,
    ):
        _check(path, resume, title)
        self.recorder = Recorder(
            observer, optimizer, self._write, every=every, layers=layers, window=window
        )
        self.path, self.title = Path(path), title
        self._closed = False
        self._publisher: Publisher | None = None
        if rank() == 0:
            self._publisher = Publisher(self.path, resume)
            self.recorder.steps = self._publisher.journal.log.steps
            self._end = weakref.finalize(self, self._publisher.end, "ended")
            self._publisher.start(self.recorder, title)

    @property
    def page(self) -> Path:
        """Return the path of the page."""
        return page_path(self.path)

    @property
    def noise(self) -> Any:
        """Return the monitor's `varreg.NoiseScale`."""
        return self.recorder.noise

    @property
    def every(self) -> int:
        """Return the current number of steps between records."""
        return self.recorder.pace.every

    def step(self, loss: float | Tensor | None = None) -> None:
        """Count a step, and record it if a record is due. Call it after `optimizer.step()`, before
        gradients are cleared. It reads a loss tensor only if a record is due.
        """
        _check_open(self)
        self.recorder.step(loss)

    def close(self, reason: str = "ended") -> None:
        """End the monitor: write the page a last time. The page then stops refreshing itself."""
        self.recorder.detach()
        self._closed = True
        if self._publisher is not None and self._end.detach():
            self._publisher.end(reason)

    def __enter__(self) -> Monitor:
        _check_open(self)
        self.recorder.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close("ended" if kind is None else f"stopped by {kind.__name__}")

    def show(self) -> Path:
        """Show the page and return its path. A notebook shows the page in its output, and updates
        it; else a browser opens it.
        """
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None and self._publisher is not None:
            from IPython.display import display

            self._publisher.handle = display(self, display_id=True)
        elif self._publisher is not None:
            self._publisher.publish()
            webbrowser.open(self.page.resolve().as_uri())
        return self.page

    def _repr_html_(self) -> str:
        """Return the current page, in an HTML frame."""
        return "" if self._publisher is None else self._publisher.frame()

    def to_pandas(self) -> Any:
        """Return all records as a DataFrame, with one row for each record and the step as index.
        With `layers=True`, each layer has columns: `layer_snr/conv1`, `layer_noise_scale/conv1`.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "varreg: to_pandas() needs pandas: pip install pandas. Without it, "
                "varreg.monitor.read(path).records has the same numbers."
            ) from error
        log = read(self.path)
        rows = [_flat(r, log.layers) for r in log.records]
        return pd.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. A run that continues from it drops later records."""
        return self.recorder.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, and drop the later records in the file."""
        _check_open(self)
        self.recorder.load_state_dict(state)
        if self._publisher is not None:
            self._publisher.start(self.recorder, self.title)

    def __repr__(self) -> str:
        status = "running" if _is_open(self) else "ended"
        steps, records = self.recorder.steps, self.recorder.pace.records
        return f"Monitor({steps:,} steps, {records:,} records, {status}: {self.page})"

    def _write(self, values: Numbers) -> None:
        pace, publisher = self.recorder.pace, self._publisher
        assert publisher is not None
        publisher.status = {"every": pace.every, "share": round(pace.spent_share, 5)}
        publisher.record(values, self.recorder.layer_names)


def _is_open(monitor: Monitor) -> bool:
    """Return whether a monitor still records: it is neither closed nor replaced by another one."""
    publisher = monitor._publisher
    return not monitor._closed and (publisher is None or publisher.is_open)


def _check_open(monitor: Monitor) -> None:
    """Raise a VarregError if a monitor does not record any more."""
    if not _is_open(monitor):
        raise VarregError(
            f"varreg: this Monitor of {monitor.page} was closed, or another one with the same path "
            "took its place. Make a new one: it continues after the records that are there."
        )


def _check(path: Any, resume: Any, title: Any) -> None:
    """Raise a VarregError if one of these arguments has a wrong type."""
    if not isinstance(path, (str, os.PathLike)):
        raise VarregError(
            "varreg: Monitor expects the path of a folder, or of a page that ends with .html; got "
            f"{type(path).__name__}."
        )
    if not isinstance(resume, bool):
        raise VarregError(f"varreg: resume must be True or False; got {resume!r}.")
    if title is not None and not isinstance(title, str):
        raise VarregError(f"varreg: title must be a string or None; got {title!r}.")


def _flat(record: Numbers, layers: list[str]) -> Numbers:
    """Return a record for a table: one column for each number of a layer, and names in place of
    layer numbers.
    """
    out: Numbers = {}
    for name, value in record.items():
        if name.startswith("layer_"):
            out |= {f"{name}/{at}": x for at, x in zip(layers, value, strict=False)}
        else:
            out[name] = [layers[i] for i in value] if isinstance(value, list) else value
    return out
