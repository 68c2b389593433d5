"""The diagonal Fisher of 200 images, the empirical one: varreg against a loop, vmap and BackPACK.

    .venv/bin/python -m benchmarks.fisher_cost --out fisher.json       # two minutes

A loop has a batch of one; `vmap` is torch.func's, with the gradients of a batch of 100 at once;
BackPACK is `SumGradSquared`. All are checked against the loop, and run in turn: medians of the
seconds, and of the ratios to varreg in the same round (10 % and 90 % quantiles). varreg's time has
all of a call: it observes the model anew each time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tools.tables import cost
from torch import Tensor, nn

import varreg
from varreg.lab.bench import timing
from varreg.lab.environment import machine
from varreg.lab.models import paper_cnn

SAMPLES, BATCH = 200, 100
Fisher = Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]


def by_varreg(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the diagonal by varreg."""
    return varreg.fisher(model, zip(x.split(BATCH), y.split(BATCH), strict=True))


def by_loop(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the diagonal with a batch of one."""
    names = dict(model.named_parameters())
    total = {n: torch.zeros_like(p) for n, p in names.items()}
    for i in range(len(y)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        for n, g in zip(names, torch.autograd.grad(loss, list(names.values())), strict=True):
            total[n].addcmul_(g, g, value=1 / len(y))
    return total


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the diagonal from the gradients of a batch at once."""
    values = {n: p.detach() for n, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, values, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    total = {n: torch.zeros_like(p) for n, p in values.items()}
    for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True):
        for n, g in each(values, a, b).items():
            total[n] += g.square_().sum(0) / len(y)
    return total


def by_backpack(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the diagonal by BackPACK, which extends the model first."""
    import backpack
    from backpack.extensions import SumGradSquared

    loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True):
        with backpack.backpack(SumGradSquared()):
            loss(model(a), b).backward()
        for n, p in model.named_parameters():
            total[n] += p.sum_grad_squared / len(y)  # type: ignore[attr-defined]
            p.grad = None
    return total


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    arms: dict[str, Fisher] = {"varreg": by_varreg, "loop": by_loop, "vmap": by_vmap}
    try:
        import backpack

        arms["BackPACK"] = by_backpack
    except ImportError:
        print("BackPACK is not installed.")
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, x, y = make(), torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,))
        models = dict.fromkeys(arms, model)
        if "BackPACK" in arms:
            extended = make()
            extended.load_state_dict(model.state_dict())
            models["BackPACK"] = backpack.extend(extended)
        truth = by_loop(model, x, y)
        for arm, run in arms.items():
            for n, t in run(models[arm], x, y).items():
                torch.testing.assert_close(
                    t, truth[n], rtol=2e-3, atol=1e-6 * float(truth[n].max())
                )
        steps = {a: timing.timed(_call(run, models[a], x, y)) for a, run in arms.items()}
        times = {
            arm: [sum(row) for row in rows]
            for arm, rows in timing.rounds(steps, options.seconds).items()
        }
        found[name] = {
            arm: {
                "seconds": statistics.median(rows),
                "over varreg": str(timing.ratio(rows, times["varreg"])),
            }
            for arm, rows in times.items()
        }
        print(f"{name}: {found[name]}", flush=True)
    about = f"{datetime.date.today()}, {machine()}, {options.threads} threads"
    result = {"results": found, "about": about}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{cost.fisher(result)}\n\n{about}")


def _call(run: Fisher, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    return lambda: run(model, x, y)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"paper's CNN": paper_cnn, "MLP 784-100-10": _mlp}


if __name__ == "__main__":
    main()
