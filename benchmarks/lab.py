"""What the lab's loop adds to a bare one over preloaded tensors.

    .venv/bin/python -m benchmarks.lab              # about three minutes

A round trains the same model on the same batches twice: in a bare loop (batch, zero_grad, forward, backward, step), and as a run of the
lab, with its metrics, statistics of λ and the noise, progress, checkpoints and files. The overhead is the second over the first, minus 1:
median over rounds, with the 10 % and 90 % quantiles; without the evaluations after each epoch, which a bare loop does not have, and with
them. (Those of the two models for images are after an epoch of 50 or 100 steps here, and after 500 to 600 in the experiments.)
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from pathlib import Path

import torch

import varreg
from varreg.lab import optimizers, tasks, timing
from varreg.lab.environment import machine
from varreg.lab.run import Config, Run, batches, train
from varreg.lab.tasks import Split, Splits


def random_images(n: int, *shape: int) -> Splits:
    """As many as are trained on in a round; the loop's cost does not depend on what they show."""
    return Splits(*(Split(torch.rand(k, *shape), torch.randint(0, 10, (k,))) for k in (n, n // 5, n // 5)))


CASES: dict[str, tuple[str, int, int, Splits | None]] = {
    "digits, batch 64": ("digits", 15, 64, None),
    "paper's CNN, batch 100": ("fashion-mnist", 1, 100, random_images(5000, 1, 28, 28)),
    "LeNet, batch 100": ("cifar10-lenet", 1, 100, random_images(10000, 3, 32, 32)),
}


def bare(config: Config, splits: Splits) -> float:
    task = tasks.task(config.task)
    torch.manual_seed(config.seed)
    model = task.model()
    optimizer = optimizers.build(config.optimizer, list(model.named_parameters()), config.lr, config.options)
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


def of_the_lab(config: Config, splits: Splits, folder: Path) -> tuple[float, float]:
    """Seconds without evaluations, and with them. Building the model is left out of both, as it is above."""
    going, evaluating = Run(config, splits), 0.0
    evaluate = going.evaluate

    def timed() -> None:
        nonlocal evaluating
        start = time.perf_counter()
        evaluate()
        evaluating += time.perf_counter() - start

    going.evaluate = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    train(going, folder, 5.0, lambda step, total: None, lambda: False)
    total = time.perf_counter() - start
    return total - evaluating, total


def quantiles(values: list[float]) -> str:
    low, middle, high = (timing.quantile(values, q) for q in (0.1, 0.5, 0.9))
    return f"**{100 * middle:.1f} %** ({100 * low:.1f}–{100 * high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Measured {datetime.date.today()}, {machine()}.\n\n| | the loop adds | with evaluations |\n| --- | --- | --- |")
    for name, (task, epochs, batch, given) in CASES.items():
        splits = given or tasks.load(task, None)
        for optimizer in ("SGD", "VRSGD"):
            loop, whole = [], []
            for i in range(options.rounds + 1):
                config = Config(task, optimizer, 0.01, i, epochs, batch, {}, 20)
                with tempfile.TemporaryDirectory() as folder:
                    plain = bare(config, splits)
                    without, total = of_the_lab(config, splits, Path(folder))
                if i:  # the first round warms up
                    loop.append(without / plain - 1)
                    whole.append(total / plain - 1)
            print(f"| {name}, {optimizer} | {quantiles(loop)} | {quantiles(whole)} |", flush=True)


if __name__ == "__main__":
    main()
