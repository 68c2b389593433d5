"""Ablations: the same optimizer without the information in λ, to see whether this information
helps.

Each ablation is a subclass of a regularized optimizer. λ is computed as usual, and then replaced at
every step:

- `mean` replaces λ by its mean over all coordinates, weighted by the squared change, and over all
  steps so far. Only a factor of the learning rate remains, the same for all coordinates.
- `shuffled` permutes λ at random over the coordinates of each parameter; with `per="tensor"`, over
  the parameters. The distribution of λ remains, but not which coordinate has which λ.

(A third ablation, `s=0`, needs no class: it is the base at the regularized optimizer's learning
rate.)
"""

from __future__ import annotations

from typing import Any

import torch

from varreg.optim.base import Regularized
from varreg.optim.parameter_step import ParameterStep


class _Mean(Regularized):
    """λ replaced by its mean over coordinates and steps so far."""

    def _replace_lambda(self, steps: list[ParameterStep]) -> None:
        squares = [(step.p - step.x).double().square() for step in steps]
        weight = sum(float(square.sum()) for square in squares)
        if weight:
            pairs = zip(steps, squares, strict=True)
            mean = sum(float((step.lam * square).sum()) for step, square in pairs) / weight
            for step in steps:
                so_far = step.state.setdefault("vr_mean", torch.zeros_like(step.state["vr_steps"]))
                so_far.add_((mean - so_far) / step.state["vr_steps"])
                step.lam = so_far.to(step.lam.dtype).expand_as(step.lam).clone()


class _Shuffled(Regularized):
    """λ shuffled over coordinates."""

    def _replace_lambda(self, steps: list[ParameterStep]) -> None:
        generator = torch.Generator()
        # With one λ for each parameter, permute these.
        single = [step for step in steps if step.lam.dim() == 0]
        if single:
            generator.manual_seed(int(single[0].state["vr_steps"]))
            lams = [
                single[i].lam for i in torch.randperm(len(single), generator=generator).tolist()
            ]
            for step, lam in zip(single, lams, strict=True):
                step.lam = lam
        # The seed is the number of the step, so that a resumed run shuffles in the same way.
        for i, step in enumerate(steps):
            generator.manual_seed(1_000_003 * int(step.state["vr_steps"]) + i)
            flat = step.lam.reshape(-1)
            step.lam = flat[torch.randperm(len(flat), generator=generator)].view_as(step.lam)


ABLATIONS: dict[str, type[Regularized]] = {"mean": _Mean, "shuffled": _Shuffled}


def ablated(cls: type[Regularized], how: str) -> type[Any]:
    """Return the class with its λ replaced.

    >>> import varreg
    >>> ablated(varreg.VRSGD, "mean").__name__
    'VRSGD_mean'
    """
    return type(f"{cls.__name__}_{how}", (ABLATIONS[how], cls), {})
