"""Measure the overhead of the lab's training loop over a bare loop on preloaded tensors.

    .venv/bin/python -m benchmarks.lab_loop              # about three minutes

A round trains the same model on the same batches twice: in a bare loop (batch, zero_grad, forward,
backward, step), and as a run of the lab, with its metrics, statistics of λ and the noise, progress,
checkpoints and files. The overhead is the second over the first, minus 1: median over rounds, with
the 10 % and 90 % quantiles; without the evaluations after each epoch, which a bare loop does not
have, and with them. (Those of the two models for images are after an epoch of 50 or 100 steps here,
and after 500 to 600 in the experiments.)
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tools.tables import cost

import varreg
from varreg.lab import optimizers
from varreg.lab.bench import timing
from varreg.lab.environment import machine
from varreg.lab.runs.config import Config, batches
from varreg.lab.runs.resume import train
from varreg.lab.runs.run import Run
from varreg.lab.store import write_json
from varreg.lab.tasks import Split, Splits, lookup


def random_images(n: int, *shape: int) -> Splits:
    """Draw as many as are trained on in a round; the cost of a loop does not depend on them."""
    return Splits(
        *(Split(torch.rand(k, *shape), torch.randint(0, 10, (k,))) for k in (n, n // 5, n // 5))
    )


CASES: dict[str, tuple[str, int, int, Splits | None]] = {
    "digits, batch 64": ("digits", 15, 64, None),
    "paper's CNN, batch 100": ("fashion-mnist", 1, 100, random_images(5000, 1, 28, 28)),
    "LeNet, batch 100": ("cifar10-lenet", 1, 100, random_images(10000, 3, 32, 32)),
}


def bare(config: Config, splits: Splits) -> float:
    """Return the seconds of a bare loop."""
    task = lookup.task(config.task)
    torch.manual_seed(config.seed)
    model = task.model()
    optimizer = optimizers.build(
        config.optimizer, list(model.named_parameters()), config.lr, config.options
    )
    if optimizers.entry(config.optimizer).regularized:
        varreg.observe(model)
    x, y = splits.train
    start = time.perf_counter()
    for epoch in range(config.epochs):
        for index in batches(len(y), config.batch, config.seed, epoch):
            optimizer.zero_grad()
            task.loss(model(x[index]), y[index]).backward()
            optimizer.step()
    return time.perf_counter() - start


def in_the_lab(config: Config, splits: Splits, folder: Path) -> tuple[float, float]:
    """Return the seconds of a run without evaluations, and with them. Building the model is left
    out of both, as it is in `bare`.
    """
    run, evaluating = Run(config, splits), 0.0
    evaluate = run.evaluate

    def timed() -> None:
        nonlocal evaluating
        start = time.perf_counter()
        evaluate()
        evaluating += time.perf_counter() - start

    run.evaluate = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    train(run, folder, 5.0, lambda step, total, loss: None, lambda: False)
    total = time.perf_counter() - start
    return total - evaluating, total


def percents(values: list[float]) -> list[float]:
    """Return the median, the 10 % and the 90 % quantile, in percent."""
    return [100 * timing.quantile(values, q) for q in (0.5, 0.1, 0.9)]


def main() -> None:
    """Read the command line, measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name, (task, epochs, batch, given) in CASES.items():
        splits = given or lookup.load(task, None)
        for optimizer in ("SGD", "VRSGD"):
            loop, total_of_loop = [], []
            for i in range(options.rounds + 1):
                config = Config(task, optimizer, 0.01, i, epochs, batch, {}, 20)
                with tempfile.TemporaryDirectory() as folder:
                    plain = bare(config, splits)
                    without, total = in_the_lab(config, splits, Path(folder))
                if i:  # the first round warms up
                    loop.append(without / plain - 1)
                    total_of_loop.append(total / plain - 1)
            rows[f"{name}, {optimizer}"] = {
                "loop": percents(loop),
                "with evaluations": percents(total_of_loop),
            }
            print(f"{name}, {optimizer}: measured", flush=True)
    saved = {"measured": f"{datetime.date.today()}, {machine()}", "rows": rows}
    print(f"\n{cost.lab_loop(saved)}\n\n{saved['measured']}")
    if options.out:
        write_json(options.out, saved)


if __name__ == "__main__":
    main()
