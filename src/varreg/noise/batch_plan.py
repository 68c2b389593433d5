"""Plan other batch sizes from the noise scale: their steps, samples and learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from varreg.errors import VarregError
from varreg.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure


class _Noise(Protocol):
    """The properties of a noise scale that a plan needs."""

    @property
    def value(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float]: ...
    @property
    def text(self) -> str: ...


class PlanRow(NamedTuple):
    """The cost of reaching the same loss with a batch size, and its learning rate; both are
    relative to the batch size `now`.
    """

    batch: int
    """The batch size B."""
    steps: float
    """The factor of the number of steps: (1 + B_n/B)/(1 + B_n/B₀)."""
    samples: float
    """The factor of the number of samples: (1 + B/B_n)/(1 + B₀/B_n)."""
    lr: float
    """The factor of the learning rate for SGD, with or without momentum: 1/steps."""
    lr_sqrt: float
    """Its square root, for Adam and others that divide by the size of gradients."""
    samples_range: tuple[float, float]
    """`samples` at the upper and the lower end of the interval of B_n."""


@dataclass(frozen=True)
class Plan:
    """A row for each batch size: `print` the plan, `plot` it, or iterate over its rows."""

    now: int
    """B₀: the batch size to which all numbers are relative."""
    noise_scale: float
    interval: tuple[float, float]
    text: str
    """The noise scale in words."""
    rows: tuple[PlanRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    @overload
    def __getitem__(self, i: int) -> PlanRow: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[PlanRow, ...]: ...
    def __getitem__(self, i: int | slice) -> PlanRow | tuple[PlanRow, ...]:
        return self.rows[i]

    def __str__(self) -> str:
        head = ("batch", "steps", "samples", "(range)", "lr, SGD", "lr, Adam")
        cells = [
            (
                f"{r.batch:,}",
                f"{r.steps:.3g} ×",
                f"{r.samples:.3g} ×",
                "({:.3g} to {:.3g})".format(*r.samples_range),
                f"{r.lr:.3g} ×",
                f"{r.lr_sqrt:.3g} ×",
            )
            for r in self.rows
        ]
        about = (
            f"Noise scale {self.text}. To the same loss, relative to a batch of {self.now:,} at a "
            "tuned learning rate."
        )
        return f"{table(head, cells, words=(), total=False)}\n{about}"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON."""
        rows = [r._asdict() for r in self.rows]
        scale = {"noise_scale": self.noise_scale, "interval": list(self.interval)}
        return {"now": self.now, **scale, "rows": rows}

    def plot(self) -> Figure:
        """Return a figure of steps, samples and learning rate over the batch size."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise VarregError(
                f"varreg: plot() needs matplotlib ({error}): pip install 'varreg[lab]'"
            ) from None
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        every = [self.now, *(r.batch for r in self.rows)]
        low, high = math.log2(min(every)), math.log2(max(every))
        batches = [2 ** (low + (high - low) * i / 16) for i in range(16 + 1)]
        curve = [relative(b, self.now, self.noise_scale, self.interval) for b in batches]
        x = [r.batch for r in self.rows]
        for name, color in (("steps", "#0072b2"), ("samples", "#d55e00")):
            left.plot(batches, [getattr(r, name) for r in curve], color=color, label=name)
            left.plot(x, [getattr(r, name) for r in self.rows], "o", color=color)
        for end in zip(*(r.samples_range for r in curve), strict=True):
            left.plot(batches, end, ":", color="#d55e00")
        right.plot(batches, [r.lr for r in curve], color="#0072b2", label="SGD")
        right.plot(batches, [r.lr_sqrt for r in curve], color="#009e73", label="Adam: its root")
        for axes, title in ((left, "to the same loss"), (right, "learning rate")):
            axes.set(xscale="log", yscale="log", xlabel="batch", title=title)
            axes.axvline(self.now, color="#9aa1ad", ls=":")
            if min(batches) < self.noise_scale < max(batches):
                axes.axvline(self.noise_scale, color="#9aa1ad", ls="--")
            axes.set_ylabel(f"relative to a batch of {self.now}")
            axes.legend(frameon=False)
        return figure


def relative(
    batch: float, now: float, noise_scale: float, interval: tuple[float, float]
) -> PlanRow:
    """Return the row of a batch size."""
    steps = _steps(batch, now, noise_scale)
    ends = [_steps(batch, now, b) * batch / now for b in interval]
    return PlanRow(
        batch,  # type: ignore[arg-type]  # a curve also has fractional batch sizes
        steps,
        steps * batch / now,
        1 / steps,
        math.sqrt(1 / steps),
        (min(ends), max(ends)),
    )


def _steps(batch: float, now: float, noise_scale: float) -> float:
    """Return (1 + B_n/B)/(1 + B_n/B₀); B₀/B where B_n is infinite."""
    if math.isinf(noise_scale):
        return now / batch
    return (1 + noise_scale / batch) / (1 + noise_scale / now)


def make_plan(noise: _Noise, batches: Sequence[int], now: int) -> Plan:
    """Return the plan for these batch sizes, each a positive whole number."""
    check_batches(batches, now)
    if math.isnan(noise.value):
        raise VarregError("varreg: there is nothing to plan with: no update was finite.")
    rows = tuple(relative(b, now, noise.value, noise.interval) for b in batches)
    return Plan(now, noise.value, noise.interval, noise.text, rows)


def check_batches(batches: Any, now: Any = 1) -> None:
    """Raise a VarregError unless there are batch sizes, and all are positive whole numbers."""
    every = [now, *batches] if isinstance(batches, Sequence) else [None]
    if len(every) < 2 or not all(type(b) is int and b > 0 for b in every):
        raise VarregError(
            "varreg: plan() expects batch sizes, positive whole numbers, as in plan([32, 128]); "
            f"got {batches!r}" + (f", now={now!r}." if len(every) > 1 else ".")
        )
