"""S2.4 by Monte Carlo: compare the predicted variance of an increment with the variance over many
independent runs.

The loss is linear, mean_i(w·x_i), so that a sample's gradient is x_i whatever w is; each element of
w is an independent run of the same experiment. The true gradient and the noise both change from
step to step. `python -m varreg.theory.increment_variance` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import varreg
from varreg.optim import REGULARIZED
from varreg.optim.base import Regularized
from varreg.tables import table

_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": {
        "momentum 0.9": {"momentum": 0.9},
        "momentum 0.9, dampening 0.5": {"momentum": 0.9, "dampening": 0.5},
        "Nesterov 0.9": {"momentum": 0.9, "nesterov": True},
    },
    "Adam": {"β₂ 0.9": {"betas": (0.9, 0.9)}, "amsgrad": {"amsgrad": True}},
    "RMSprop": {"centered": {"centered": True}, "momentum 0.9": {"momentum": 0.9}},
}


def _cases() -> Iterator[tuple[str, tuple[type[Regularized], dict[str, Any]]]]:
    """Yield every optimizer with its defaults and its variants; AdamW's increment is Adam's."""
    for name, cls in REGULARIZED.items():
        if name != "AdamW":
            yield name, (cls, {})
            for variant, arguments in _VARIANTS.get(name, {}).items():
                yield f"{name}, {variant}", (cls, arguments)


CASES = dict(_cases())
"""The class and its arguments, by the name of a case."""


class _Linear(nn.Module):
    """Σ w·x for each sample: the gradient of sample i is x_i."""

    def __init__(self, runs: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(runs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum(1)


def noisy_stream(noise: float, m: int, runs: int, steps: int) -> Callable[[int], Tensor]:
    """Return a function from t to x of step t, [m, runs]. The mean of x oscillates between 0.5 and
    1.5; the size of its noise doubles every third step.

    `noise` is the standard error of the mean over m samples, in units of the mean.
    """
    generator = torch.Generator().manual_seed(0)

    def at(t: int) -> Tensor:
        sigma = noise * math.sqrt(m) * (2 if t % 3 == 0 else 1)
        return (
            1
            + 0.5 * math.sin(t / 5)
            + sigma * torch.randn(m, runs, generator=generator, dtype=torch.float64)
        )

    return at


def predicted_over_observed(
    case: str,
    noise: float,
    version: str | None = None,
    runs: int = 4000,
    m: int = 8,
    steps: int = 40,
) -> list[float]:
    """Return, for each step, the mean predicted variance of the increment, divided by the variance
    over runs.
    """
    regularized, arguments = CASES[case]
    model, plain = _Linear(runs), _Linear(runs)
    extra = {"variance": version} if version else {}
    # With scale_free=False and history="sum", each step adds the variance of its increment to the
    # history.
    ours = regularized(
        model.parameters(), lr=1.0, scale_free=False, history="sum", s=1.0, **arguments, **extra
    )
    theirs: Any = regularized._base
    theirs = theirs(plain.parameters(), lr=1.0, **arguments)
    stream, ratios, before = noisy_stream(noise, m, runs, steps), [], 0.0
    with varreg.observe(model):
        for t in range(steps):
            ours.zero_grad()
            model(stream(t)).mean().backward()
            plain.w.grad = model.w.grad.clone()  # type: ignore[union-attr]
            ours.step()
            x = plain.w.detach().clone()
            theirs.step()
            after = float(ours.state[model.w]["vr_history"].mean())
            ratios.append((after - before) / (m - 1) / float((plain.w.detach() - x).var()))
            before = after
    return ratios


def measured(noise: float, **sizes: int) -> list[tuple[str, str, float]]:
    """Return (case, version, predicted over observed), averaged over the second half of steps."""
    rows = []
    for case, (regularized, _) in CASES.items():
        adaptive = "variance" in regularized._extra_options
        for version in ("direct", "simplified") if adaptive else (None,):
            ratios = predicted_over_observed(case, noise, version, **sizes)
            half = ratios[len(ratios) // 2 :]
            rows.append((case, version or "exact", math.exp(sum(map(math.log, half)) / len(half))))
    return rows


def main() -> None:
    noises = (0.03, 0.1, 0.3, 1.0)
    columns = [measured(noise) for noise in noises]
    rows = [
        (case, version, *(f"{column[i][2]:.2f}" for column in columns))
        for i, (case, version, _) in enumerate(columns[0])
    ]
    print(
        "Predicted over observed variance of the increment; columns: standard error of the mean "
        "gradient over the gradient"
    )
    print(table(("optimizer", "version", *map(str, noises)), rows, words=(0, 1), total=False))


if __name__ == "__main__":
    main()
