"""Run steps of an observed model, and return the gradients and moments that varreg measures."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from varreg.devices import in_double
from varreg.engine.observer import observe
from varreg.engine.parameters import moments
from varreg.errors import VarregError
from varreg.verification.result import CannotVerify
from varreg.verification.steps import Steps
from varreg.verification.tolerance import Setting


class Measured(NamedTuple):
    """The gradient of one parameter after a step, and its moments; None if there are none."""

    grad: Tensor | None
    moments: tuple[int, Tensor, Tensor, Tensor] | None


class Measurement(NamedTuple):
    """The results of varreg in each of several steps."""

    steps: list[dict[str, Measured]]
    mechanisms: dict[str, str]
    """How each parameter was measured, as `Observer.coverage` names it."""


def measure(steps: Steps, setting: Setting) -> Measurement:
    """Return the results of varreg in two steps. The second step uses the plans that the first one
    makes.
    """
    measured: list[dict[str, Measured]] = []
    batch = steps.selection.batch
    try:
        with observe(
            steps.model, reduction=setting.reduction, batch_dim=setting.batch_dim
        ) as observer:
            with steps.rehearsal.with_dropout():
                steps.run(batch)  # a model that is refused in training is refused here, too
            for _ in range(2):
                grads = steps.run(batch).grads
                measured.append({n: _read(p, grads[n]) for n, p in steps.params.items()})
            mechanisms = {row[0]: row[2] for row in observer.coverage()}
    except Exception as error:
        message = str(error)
        if isinstance(error, VarregError):
            raise CannotVerify(message, status="refused") from error
        raise CannotVerify(
            f"The model runs without varreg, and fails with it ({type(error).__name__}: "
            f"{message}).",
            "This is an error in varreg: please report it, with the model.",
            status="refused",
        ) from error
    return Measurement(measured, mechanisms)


def _read(p: Tensor, grad: Tensor | None) -> Measured:
    """Return a copy of a parameter's moments in float64, beside its gradient."""
    m = moments(p)
    if m is None:
        return Measured(grad, None)
    wide = [in_double(t) for t in (m.mean, m.second_moment, m.variance)]
    return Measured(grad, (m.count, wide[0], wide[1], wide[2]))
