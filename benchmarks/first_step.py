"""Measure the time of the first observed step, which includes trials and plans.

    .venv/bin/python -m benchmarks.first_step                # about a minute
    .venv/bin/python -m benchmarks.first_step --only Fourier # a part of it; nothing is saved

Each workload runs in a process of its own, forward and backward: a few plain steps to warm torch
up, the first observed step, and then more of them. Native code is built before, so that its
compilation (a few seconds, once per machine) is not in it. Results go to
`benchmarks/results/first_step.json`.

Two of the models are not in `varreg bench`, since only their first steps differ: one calls a
function that the engine has to try, and one reads values of the batch in Python.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tools.tables import speed
from torch import Tensor, nn

import varreg
from varreg import native
from varreg.lab.bench.workloads import WORKLOADS, Workload, built, call, images
from varreg.lab.environment import machine

RESULTS = Path(__file__).parent / "results" / "first_step.json"


class Fourier(nn.Module):
    """A classifier that mixes rows of an image by Fourier transforms, as FNet mixes tokens. The
    engine does not know `torch.fft.fft2`, and tries it.
    """

    def __init__(self, width: int = 64, layers: int = 2):
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.flatten(1, 2))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = norm(h + torch.fft.fft2(h).real)
            h = h + layer(h).relu()
        logits: Tensor = self.head(h.mean(1))
        return logits


class Checked(nn.Module):
    """An MLP that stops at NaN and keeps the size of its features: `if` and `.item()` take values
    of the batch out of torch, so forwards are tried.
    """

    def __init__(self, width: int = 512):
        super().__init__()
        self.first = nn.Linear(784, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        self.size = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x.flatten(1)).relu()).relu()
        if h.isnan().any():
            raise ValueError("features are not finite")
        self.size = h.detach().norm().item()
        logits: Tensor = self.head(h)
        return logits


MODELS = WORKLOADS | {
    w.name: w
    for w in (
        Workload(
            "Fourier 2×64 (`torch.fft.fft2` is tried), batch 64", Fourier, images(64, 1, 28, 28)
        ),
        Workload("MLP with `.item()` and `if`, batch 64", Checked, images(64, 1, 28, 28)),
    )
}


def measure(name: str) -> dict[str, Any]:
    """Return seconds of plain steps, of the first observed one, and of those after it."""
    torch.set_num_threads(2)
    native.status()
    workload = MODELS[name]
    model, x, y = built(workload)

    def step() -> float:
        model.zero_grad()
        start = time.perf_counter()
        workload.loss(call(model, x), y).backward()
        return time.perf_counter() - start

    plain = [step() for _ in range(6)][1:]
    varreg.observe(model)
    first, *warm = [step() for _ in range(8)]
    return {
        "name": name,
        "plain": statistics.median(plain),
        "first": first,
        "warm": statistics.median(warm[2:]),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure all workloads, print the table and save it; with `--only`, measure some of them, and
    save nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="WORD", default="", help="models with this in their name")
    only = parser.parse_args(argv).only
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (name,)) for name in MODELS if only in name]
    saved = {"date": datetime.date.today().isoformat(), "machine": machine(), "rows": rows}
    print(speed.first_step(saved))
    if not only:
        RESULTS.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
