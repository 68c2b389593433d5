"""`varreg noise`: train a task for some steps, measure its noise scale, and plan other batches."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

import varreg
from varreg.errors import VarregError
from varreg.lab import optimizers, store
from varreg.lab.environment import environment
from varreg.lab.report.style import COLORS, STYLE, new_figure, save, scale
from varreg.lab.runs.config import Config
from varreg.lab.runs.run import Run
from varreg.lab.tasks import lookup
from varreg.noise.batch_plan import check_batches

POINTS = 100
"""The largest number of points of the curve."""
FACTORS = (0.25, 1, 4, 16, 64)
"""The planned batch sizes by default, relative to the measured one."""


@dataclass(frozen=True)
class Measurement:
    """The arguments of `varreg noise`."""

    task: str
    optimizer: str = "SGD"
    """With options: `SGD:momentum=0.9`."""
    lr: float | None = None
    """None: the middle of those in which the optimizer is tuned."""
    steps: int = 500
    batch: int = 0
    """0: the task's own."""
    window: int = 200
    l1: bool = False
    seed: int = 0

    def config(self) -> Config:
        """Return the run that it needs."""
        name, options = optimizers.parse(self.optimizer)
        entry, task = optimizers.entry(name), lookup.task(self.task)
        lr = math.sqrt(entry.low * entry.high) if self.lr is None else self.lr
        batch = self.batch or task.batch
        options = {"steps": self.steps, **task.recipe, **options}
        return Config(self.task, name, lr, self.seed, task.epochs, batch, options)


Curve = dict[str, list[float]]


def measure(measurement: Measurement, data_dir: Path | None) -> tuple[varreg.NoiseScale, Curve]:
    """Train, and return the noise scale at the end, and its values during training. Ctrl-C ends the
    training early.
    """
    run = Run(measurement.config(), data_dir=data_dir)
    run.observer = run.observer or run.observe()
    run.verify()
    run.noise = varreg.NoiseScale(run.observer, window=measurement.window, l1=measurement.l1)
    noise = run.noise
    curve: Curve = {name: [] for name in ("step", "loss", "value", "low", "high")}
    every = max(1, measurement.steps // POINTS)
    try:
        for step in range(1, measurement.steps + 1):
            run.train()
            if step % every == 0 or step == measurement.steps:
                row = (step, run.losses[-1], noise.value, *noise.interval)
                for column, value in zip(curve.values(), row, strict=True):
                    column.append(value)
                if not math.isfinite(row[1]):
                    raise VarregError(
                        f"varreg: the loss of {measurement.task} is {row[1]} after {step} steps. "
                        "Use a smaller --lr."
                    )
    except KeyboardInterrupt:
        if not noise.updates:
            raise
    return noise, curve


def figure(curve: Curve) -> Figure:
    """Draw the noise scale and its interval over steps; an interval without an upper bound is open
    at the top.
    """
    with mpl.rc_context(STYLE):
        made, (axes,) = new_figure(1, 3.4, 6.4)
        finite = [v for name in ("value", "low") for v in curve[name] if math.isfinite(v)]
        top = 10 * max(finite, default=1.0)
        value, low, high = ([min(v, top) for v in curve[k]] for k in ("value", "low", "high"))
        axes.fill_between(curve["step"], low, high, color=COLORS[1], alpha=0.15, lw=0)
        axes.plot(curve["step"], value, color=COLORS[1])
        scale(axes, finite)
        axes.set(title="gradient noise scale", xlabel="steps")
        return made


def conduct(
    measurement: Measurement,
    batches: list[int],
    out: Path,
    data_dir: Path | None,
    command: list[str],
) -> int:
    """Measure, print, and save `noise.json` and two figures; return the exit code."""
    if measurement.steps < 2:
        raise VarregError(f"varreg: --steps must be at least 2; got {measurement.steps}.")
    if batches:
        check_batches(batches)  # before the training, not after it
    store.check_writable(out)
    noise, curve = measure(measurement, data_dir)
    planned = batches or [max(1, round(f * noise.batch)) for f in FACTORS]
    plan = noise.plan(planned)
    readings: dict[str, Any] = {r.name: asdict(r) for r in (*noise.layers, noise.model)}
    record = {
        "kind": "noise",
        "measurement": asdict(measurement),
        "config": asdict(measurement.config()),
        "command": command,
        "environment": environment(),
        "curve": curve,
        "readings": readings,
        "plan": plan.as_dict(),
    }
    store.write_json(out / "noise.json", record)
    with mpl.rc_context(STYLE):
        pictures = {"noise": figure(curve), "plan": plan.plot()}
    for name, made in pictures.items():
        save(made, out / f"{name}.svg")
    print(f"{noise}\n\n{plan}\n\nSaved: {out / 'noise.json'}, noise.svg and plan.svg beside it.")
    return 0
