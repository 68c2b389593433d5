"""Count the kernels that a training step launches on an accelerator, and its waits, beside those of
plain training.

    python -m benchmarks.launches    # print the table, and save benchmarks/results/launches.json

Counted on the pretend device of the tests, which has the CPU's kernels and one launch for each. No
GPU is needed, and nothing is said about time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tests.support import pretend_device
from tests.support.pretend_device import Count
from tools.tables.speed import launches as table
from torch import Tensor, nn

import varreg
from varreg.lab.bench.workloads import WORKLOADS, Workload, built
from varreg.lab.store import write_json

RESULTS = Path(__file__).parent / "results" / "launches.json"
PHASES = "forward", "backward", "step"
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "SGD, momentum": (torch.optim.SGD, varreg.VRSGD, {"lr": 0.01, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, varreg.VRAdam, {"lr": 1e-3}),
}
WARM = 12
"""Steps before the one that is counted: plans are made and trials done in the first ones."""


def counted(
    w: Workload,
    make: Callable[..., Any],
    options: dict[str, Any],
    observe: bool,
    micro_batches: int = 1,
    clip: bool = False,
    observed: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Count]:
    """Return what each phase of a step in the steady state asks of the device. `observed` are the
    options of `varreg.observe`.
    """
    pretend_device.load()
    model, x, y = built(w)
    model, (x, y) = model.to("pretend"), (t.to("pretend") for t in (x, y))
    if observe:
        varreg.observe(model, **observed)
    optimizer = make(model.parameters(), **options)
    for _ in range(WARM):
        _step(w, model, optimizer, x, y, micro_batches, clip)
    return _step(w, model, optimizer, x, y, micro_batches, clip)


def _step(
    w: Workload,
    model: nn.Module,
    optimizer: Any,
    x: Tensor,
    y: Tensor,
    micro_batches: int,
    clip: bool,
) -> dict[str, Count]:
    phases = {phase: Count() for phase in PHASES}
    optimizer.zero_grad()
    for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        with pretend_device.count() as forward:
            loss = w.loss(model(xs), ys) / micro_batches
        with pretend_device.count() as backward:
            loss.backward()
        phases["forward"] += forward
        phases["backward"] += backward
    with pretend_device.count() as step:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    phases["step"] += step
    return phases


Row = list[str]


def rows(w: Workload, optimizer: str) -> tuple[list[Row], float]:
    """Return two rows of the table, plain training's and ours, and how many times the launches of
    the first the second has.
    """
    plain, ours, options = OPTIMIZERS[optimizer]
    made, totals = [], []
    for label, make in ((optimizer, plain), ("varreg", ours)):
        phases = counted(w, make, options, observe=make is ours)
        each = [phases[phase].launched for phase in PHASES]
        totals.append(sum(each))
        ratio = f"{totals[1] / totals[0]:.2f}" if make is ours else ""
        waits = sum(sum(phase.waits.values()) for phase in phases.values())
        made.append([w.name, label, *map(str, each), str(totals[-1]), ratio, str(waits)])
    return made, totals[1] / totals[0]


def main() -> None:
    """Count, save, and print the table."""
    argparse.ArgumentParser("python -m benchmarks.launches", description=__doc__).parse_args()
    pairs = itertools.product(WORKLOADS.values(), OPTIMIZERS)
    saved = {"rows": [row for pair in pairs for row in rows(*pair)[0]]}
    write_json(RESULTS, saved)
    print(table(saved))


if __name__ == "__main__":
    main()
