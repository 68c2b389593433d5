"""Is it the information in λ that helps? The same optimizer with that information taken out.

Each takes a regularized optimizer's class to one whose λ is replaced, at every step, after it was computed as ever:

- `mean`: by its mean over all coordinates, weighted by the squared change, and over all steps so far. What is left is a factor of the learning
  rate, that tells neither coordinates nor steps apart.
- `shuffled`: within each parameter, over its coordinates, at random; with `per="tensor"`, over the parameters. What is left is how λ is
  distributed, and not where.

(`s=0`, the third one, needs no class: it is the base at the regularized optimizer's learning rate.)
"""

from __future__ import annotations

from typing import Any

import torch

from varreg.optim.parts import Work
from varreg.optim.regularized import Regularized


class _Mean(Regularized):
    def _replace_lambda(self, works: list[Work]) -> None:
        squares = [(w.p - w.x).double().square() for w in works]
        weight = sum(float(square.sum()) for square in squares)
        if weight:
            mean = sum(float((w.lam * square).sum()) for w, square in zip(works, squares, strict=True)) / weight
            for w in works:
                so_far = w.state.setdefault("vr_mean", torch.zeros_like(w.state["vr_steps"]))
                so_far.add_((mean - so_far) / w.state["vr_steps"])
                w.lam = so_far.to(w.lam.dtype).expand_as(w.lam).clone()


class _Shuffled(Regularized):
    def _replace_lambda(self, works: list[Work]) -> None:
        generator = torch.Generator()
        single = [w for w in works if w.lam.dim() == 0]  # one λ for a whole parameter: these change places
        if single:
            generator.manual_seed(int(single[0].state["vr_steps"]))
            lams = [single[i].lam for i in torch.randperm(len(single), generator=generator).tolist()]
            for w, lam in zip(single, lams, strict=True):
                w.lam = lam
        for i, w in enumerate(works):  # from the step's number, so that a run that is resumed shuffles as one that was not
            generator.manual_seed(1_000_003 * int(w.state["vr_steps"]) + i)
            flat = w.lam.reshape(-1)
            w.lam = flat[torch.randperm(len(flat), generator=generator)].view_as(w.lam)


ABLATIONS: dict[str, type[Regularized]] = {"mean": _Mean, "shuffled": _Shuffled}


def ablated(cls: type[Regularized], how: str) -> type[Any]:
    """The class with its λ replaced.

    >>> import varreg
    >>> ablated(varreg.VRSGD, "mean").__name__
    'VRSGD_mean'
    """
    return type(f"{cls.__name__}_{how}", (ABLATIONS[how], cls), {})
