"""`NoiseScale`: the gradient noise scale while training, from running averages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varreg._torch import disable_dynamo
from varreg.engine.noise_summary import layer_of
from varreg.engine.observer import Observer
from varreg.errors import MeasurementError, VarregError
from varreg.noise import measure
from varreg.noise.batch_plan import Plan, make_plan
from varreg.noise.reading import Reading, in_order, l1_readings, l2_readings
from varreg.noise.recent import Recent
from varreg.tables import table
from varreg.thresholds import WINDOW


class NoiseScale:
    r"""The gradient noise scale B_n = tr Σ/|G|² (McCandlish et al. 2018): the batch size at which
    the noise of the mean gradient is as large as its signal.

    Each `update()` takes from the moments of one batch, per layer,

        tr Σ = Σ_p s²,   |Ĝ|² = |ḡ|² − tr Σ/m,   with s² = m/(m−1)·v²

    Both are unbiased. They are averaged over the last `window` updates, and `value` is the ratio of
    the averages. The ratio of one batch is useless, and so is an average of ratios.

    The interval is Fieller's for a ratio of means, at two standard errors that include
    autocorrelation. It is about the updates of the window: if gradients of samples are normal, it
    holds B_n of these steps together in 19 of 20 windows, also if |G|² drifts or jumps. Late in
    real training it is too narrow, and mostly too high, since few steps have most of |G|²
    (docs/evidence/noise.md has how often it held B_n). It is neither about single steps nor about
    those that follow: for the mean of a process that goes on, it is too narrow if updates stay
    alike for a tenth of the window or more.

    Under a GradScaler, `noise` and `signal` are those of the scaled loss. B_n is not scaled, but
    for one window after a change of the scale, updates with the larger scale weigh more.

    With `l1=True`, B_n is (Σ_p s_p)²/(Σ_p |G_p|)², the version for optimizers that step by signs
    (signSGD, Lion; Adam is between the two). |G_p| has no unbiased estimate. There is an estimate
    whose mean is never too small, and one whose mean is never too large: the interval covers both,
    and `value` uses their middle.

    Args:
        observer: The observer that `varreg.observe` returned.
        window: The number of updates in the averages.
        l1: Measure the ℓ1 version instead. It costs some passes over all parameters.

    >>> import torch, varreg
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> noise = varreg.NoiseScale(varreg.observe(model))
    >>> _ = torch.manual_seed(0)
    >>> for _ in range(100):  # gradients are the inputs: mean (1, 1, 1), variance 4 each
    ...     model.zero_grad()
    ...     model(1 + 2 * torch.randn(8, 3)).mean().backward()
    ...     noise.update()
    >>> noise  # tr Σ/|G|² = 12/3
    NoiseScale(4.0 (3.4 to 4.8), from 100 updates)

    """

    def __init__(self, observer: Observer, *, window: int = WINDOW, l1: bool = False):
        if not isinstance(observer, Observer):
            raise VarregError(
                "varreg: NoiseScale expects the observer that varreg.observe(model) returns, got "
                f"{type(observer).__name__}."
            )
        if isinstance(window, bool) or not isinstance(window, int) or window < 2:
            raise VarregError(f"varreg: window must be a whole number of at least 2; got {window}.")
        self.observer, self.window, self.l1 = observer, window, bool(l1)
        self.updates = 0
        """The number of updates so far."""
        self.batch = 0
        """m, the number of samples in the last update."""
        self._recent = Recent(window)
        self._cached_readings: tuple[int, list[Reading]] = (-1, [])
        self._warned = False

    @disable_dynamo  # it runs eagerly, even inside a compiled training step
    def update(self) -> None:
        """Add the moments of a step. Call it after the last `backward()` of the step, before
        gradients are cleared.

        It does not wait for an accelerator. With sharded parameters it needs one small reduction:
        all ranks must call it.
        """
        found = self._measured()
        if not measure.has_variance(found):
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "varreg: NoiseScale leaves out a batch of one sample, or of one group: it has "
                    "no variance. Use larger batches or more groups, or accumulate several batches "
                    "before update().",
                    stacklevel=2,
                )
            return
        rows = measure.numbers(found, self.l1)
        names = [f.ledger.name for f in found]
        self._recent.add(names, measure.estimates(found, self.l1) if rows is None else rows)
        self.batch = measure.samples(found)
        self.updates += 1

    def _measured(self) -> list[measure.Measured]:
        """Return the moments of all trained parameters. Raise a VarregError if there are none, or
        if a gradient has none.
        """
        if not self.observer.is_on:
            raise VarregError(
                "varreg: this NoiseScale's observer was removed. Observe the model again, and make "
                "a new NoiseScale."
            )
        trained = [(p, ledger) for p, ledger in self.observer.parameters if p.requires_grad]
        found = measure.read(trained)
        for f in found:
            if f.moments is None and f.ledger.is_unmeasured(f.parameter):
                raise MeasurementError(
                    f"varreg: '{f.ledger.name}' has a gradient that was not measured, so that the "
                    "noise scale would lack it. Use the parameter in a forward() of the model, "
                    "register a rule for its module with varreg.register_rule, or freeze it."
                )
        if not measure.samples(found):
            raise VarregError(
                "varreg: NoiseScale.update() finds no moments. Call it after backward(), before "
                "gradients are cleared."
            )
        return found

    def _readings(self) -> list[Reading]:
        """Return one reading for each layer, and then that of the whole model. They are computed
        once for each update.
        """
        if self._cached_readings[0] != self.updates:
            rows = in_order(self._recent.rows(), self.updates)
            series = torch.cat([rows, rows.sum(1, keepdim=True)], 1).transpose(0, 1)
            make = l1_readings if self.l1 else l2_readings
            self._cached_readings = (
                self.updates,
                make([*self._recent.layers, "whole model"], series),
            )
        return self._cached_readings[1]

    @property
    def model(self) -> Reading:
        """Return the reading of the whole model."""
        return self._readings()[-1]

    @property
    def layers(self) -> list[Reading]:
        """Return the reading of each layer: the parameters that belong to one module directly."""
        return self._readings()[:-1]

    @property
    def value(self) -> float:
        """Return B_n of the whole model: infinite if the signal is not positive, nan before the
        first update.
        """
        return self.model.value

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval (low, high) of B_n of the whole model, at two standard errors."""
        return self.model.interval

    @property
    def latest(self) -> Tensor:
        """Return tr Σ and |Ĝ|² of the last update, `[layers, 2]`. Their ratio is useless, since
        they come from one batch.
        """
        rows = self._recent.rows()
        if rows is None or not self.updates:
            raise VarregError("varreg: NoiseScale has no update; call update() after backward().")
        return rows[(self.updates - 1) % self.window, :, :2].detach().cpu().double()

    def plan(self, batches: Sequence[int], now: int | None = None) -> Plan:
        """Return a plan for other batch sizes: their costs and learning rates, relative to the
        batch size `now`. By default, `now` is the batch of the last update.
        """
        if not self.updates:
            raise VarregError(
                "varreg: there is nothing to plan with. Call NoiseScale.update() after backward(), "
                "for some hundred steps."
            )
        return make_plan(self.model, batches, self.batch if now is None else now)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors, numbers and names."""
        rows, layers = self._recent.rows(), list(self._recent.layers)
        rows = None if rows is None else rows.detach().clone()
        counts = {"updates": self.updates, "batch": self.batch, "layers": layers}
        return {"window": self.window, "l1": self.l1, "rows": rows, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, with its window. Its layers must be layers of the model."""
        _check_state(
            state, self.l1, {layer_of(ledger.name) for _, ledger in self.observer.parameters}
        )
        self.window, self.updates, self.batch = (state[k] for k in ("window", "updates", "batch"))
        rows = None if state["rows"] is None else state["rows"].clone()
        self._recent = Recent(self.window, self.updates, state["layers"], rows)
        self._cached_readings = (-1, [])

    def __repr__(self) -> str:
        kind = "ℓ1, " if self.l1 else ""
        return f"NoiseScale({self.model.text}, {kind}from {self.updates:,} updates)"

    def __str__(self) -> str:
        if not self.updates:
            return "varreg: no noise scale yet; call update() after backward()."
        head = ("layer", "noise", "signal", "noise scale, and its interval")
        rows = [(r.name, f"{r.noise:.3g}", f"{r.signal:.3g}", r.text) for r in self._readings()]
        n = len(in_order(self._recent.rows(), self.updates))
        about = f"Averages over {n:,} updates; the last batch had {self.batch:,} samples."
        if without := min(self.updates, self.window) - n:
            about += f" Left out, since not finite: {without:,} of the last {n + without:,}."
        return f"{table(head, rows, words=(0, 3))}\n{about}"


def _check_state(state: Any, l1: bool, known: set[str]) -> None:
    """Raise a VarregError if a checkpoint is not one of this NoiseScale."""
    if not _is_state(state):
        names = ", ".join(map(str, state)) if isinstance(state, dict) else ""
        raise VarregError(
            "varreg: NoiseScale.load_state_dict expects the result of its state_dict(); got "
            f"{type(state).__name__} with {names or 'nothing of it'}."
        )
    if state["l1"] != l1:
        raise VarregError(
            f"varreg: the checkpoint's NoiseScale has l1={state['l1']}, this one {l1}."
        )
    if other := set(state["layers"]) - known:
        raise VarregError(
            "varreg: the checkpoint's NoiseScale is of another model: this one has no layer "
            f"{', '.join(sorted(other))}."
        )


def _is_state(state: Any) -> bool:
    """Return whether an object can be the `state_dict()` of a NoiseScale."""
    types = {"window": int, "l1": bool, "updates": int, "batch": int, "layers": list}
    if not isinstance(state, dict) or any(type(state.get(k)) is not v for k, v in types.items()):
        return False
    layers, rows = state["layers"], state.get("rows")
    if state["window"] < 2 or min(state["updates"], state["batch"]) < 0:
        return False
    if not all(isinstance(name, str) for name in layers) or len({*layers}) < len(layers):
        return False
    if not state["updates"]:
        return rows is None
    shape = (state["window"], len(layers), 5 if state["l1"] else 2)
    return isinstance(rows, Tensor) and rows.is_floating_point() and rows.shape == shape
