"""Record σ² in real training: run plain SGD and measure σ². At the end of the run, measure how v²
of a batch relates to the error of that batch.

`python -m varreg.lab.variances` records the series that ship with varreg, from the paper's two
tasks, as small files for `varreg theory`.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import varreg
from varreg.lab import store
from varreg.lab.runs.config import Config
from varreg.lab.runs.run import Run


class Recorded(NamedTuple):
    """A series that ships with varreg: SGD with this learning rate and number of epochs; every
    `every`-th step is kept.
    """

    task: str
    lr: float
    epochs: int
    every: int


RECORDED = {
    "fashion-mnist": Recorded("fashion-mnist", 0.1, 5, 2),
    "cifar10": Recorded("cifar10-lenet", 0.1, 16, 6),
}
BATCH, ELEMENTS, BATCHES = 100, 8, 1000


Columns = dict[str, list[float]]


def record(series: Recorded, elements: int = ELEMENTS, seed: int = 0) -> tuple[Columns, Run]:
    """Return Σv² and |ḡ|² of the model, of each weight tensor, and of single elements of each,
    drawn at random; and the run, at its end.

    Columns are `v2 model`, `g2 model`, `v2 conv1.weight`, …, `v2 conv1.weight[7]`, …
    """
    # The run has moments if it measures its noise.
    run = Run(Config(series.task, "SGD", series.lr, seed, series.epochs, BATCH, {"noise": True}))
    weights = [(name, p) for name, p in run.named if p.dim() > 1]
    generator = torch.Generator().manual_seed(seed)
    chosen = [
        (name, p, int(torch.randint(p.numel(), (), generator=generator)))
        for name, p in weights
        for _ in range(elements)
    ]
    columns: Columns = {}

    def add(name: str, v2: torch.Tensor, g2: torch.Tensor) -> None:
        columns.setdefault(f"v2 {name}", []).append(float(v2.sum()))
        columns.setdefault(f"g2 {name}", []).append(float(g2.sum()))

    while run.step < run.total:
        run.advance()
        if run.step % series.every == 0:
            moments = {p: m for _, p in run.named if (m := varreg.moments(p)) is not None}
            squares = {p: (m.variance, m.mean.square()) for p, m in moments.items()}
            add("model", *(torch.stack([s[i].sum() for s in squares.values()]) for i in (0, 1)))
            for name, p in weights:
                add(name, *squares[p])
            for name, p, i in chosen:
                add(f"{name}[{i}]", *(s.flatten()[i] for s in squares[p]))
    return columns, run


def at_fixed_parameters(run: Run, count: int = BATCHES) -> Columns:
    """Return Σv², |ḡ|², the squared error |ḡ − g|² and the progress ḡ·g/|g|² of many batches at
    fixed parameters.

    g is the gradient of all samples.
    """
    run.full_gradient()
    g = [p.grad.clone() for _, p in run.named if p.grad is not None]
    length = sum(float(a.square().sum()) for a in g)
    columns: Columns = {"v2": [], "g2": [], "e2": [], "progress": []}
    generator = torch.Generator().manual_seed(0)
    train = run.splits.train
    for _ in range(count):
        index = torch.randint(len(train), (BATCH,), generator=generator)
        run.optimizer.zero_grad()
        x, y = train.take(index, 0)
        run.task.loss(run.model(x), y).backward()
        moments = [m for _, p in run.named if (m := varreg.moments(p)) is not None]
        columns["v2"].append(sum(float(m.variance.sum()) for m in moments))
        columns["g2"].append(sum(float(m.mean.square().sum()) for m in moments))
        columns["e2"].append(
            sum(float((m.mean - a).square().sum()) for m, a in zip(moments, g, strict=True))
        )
        columns["progress"].append(
            sum(float((m.mean * a).sum()) for m, a in zip(moments, g, strict=True)) / length
        )
    return columns


def write(path: Path, columns: Columns) -> None:
    """Write a series with four digits. Equal numbers give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{v:.4g}" for v in row] for row in zip(*columns.values(), strict=True))
    store.write(path, gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    """Record the series that are named, or all."""
    folder = Path(__file__).parents[1] / "theory" / "series"
    for name in sys.argv[1:] or RECORDED:
        columns, run = record(RECORDED[name])
        write(folder / f"{name}.csv.gz", columns)
        write(folder / f"{name}-still.csv.gz", at_fixed_parameters(run))
        print(folder / f"{name}.csv.gz", flush=True)


if __name__ == "__main__":
    main()
