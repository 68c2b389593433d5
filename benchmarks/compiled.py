"""Measure the cost of observing under torch.compile: the time of an observed, compiled step over
that of a plain, compiled one.

    .venv/bin/python -m benchmarks.compiled    # some minutes

A round is one training step (zero_grad, forward, backward, step) of each: Adam on the plain model,
VRAdam on the observed one, both compiled by inductor. Ratios are medians over rounds, with the 10 %
and 90 % quantiles. Each number of threads has a process of its own. Before, the moments of the
compiled model are compared with those of an eager one. Results go to
`benchmarks/results/compiled.json`.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tools.tables.speed import compiled as table

import varreg
from varreg.lab.bench import timing
from varreg.lab.bench.training import LR
from varreg.lab.bench.workloads import text
from varreg.lab.environment import machine
from varreg.lab.models import GPT
from varreg.lab.store import write_json
from varreg.lab.tasks.preparation import per_token

RESULTS = Path(__file__).parent / "results" / "compiled.json"


class Case(NamedTuple):
    """A GPT of four layers, and the batch that it is trained on."""

    width: int
    heads: int
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """Return what the table calls it."""
        return f"GPT 4×{self.width}, batch {self.batch}, {self.tokens} tokens"


CASES = (Case(192, 6, 16, 128), Case(64, 4, 8, 32))


class Training:
    """A compiled model with its optimizer."""

    def __init__(self, case: Case, is_observed: bool):
        torch.manual_seed(0)
        self.model = GPT(width=case.width, heads=case.heads)
        self.x, self.y = text(case.batch, case.tokens)()
        if is_observed:
            varreg.observe(self.model)
        optimizer = varreg.VRAdam if is_observed else torch.optim.Adam
        self.optimizer = optimizer(self.model.parameters(), lr=LR)
        self.call = torch.compile(self.model)

    def forward(self) -> None:
        """Clear gradients and compute the loss."""
        self.optimizer.zero_grad()
        self.loss = per_token(self.call(self.x), self.y)

    def backward(self) -> None:
        """Compute gradients, and moments where the model is observed."""
        self.loss.backward()

    def step(self) -> None:
        """Let the optimizer step."""
        self.optimizer.step()


def check(case: Case) -> None:
    """Raise unless compiled and eager models have the same moments, up to rounding."""
    one, other = Training(case, True), Training(case, True)
    other.call = other.model
    for training in (one, one, other):  # the first compiled step is still eager
        training.forward()
        training.backward()
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        m, n = varreg.moments(p), varreg.moments(q)
        assert m is not None
        assert n is not None
        torch.testing.assert_close(m.square, n.square, rtol=1e-3, atol=1e-3 * float(n.square.max()))


def measure(case: Case, threads: int, seconds: float) -> dict[str, Any]:
    """Return what a step costs, in this process."""
    torch.set_num_threads(threads)
    check(case)
    both = {"plain": Training(case, False), "observed": Training(case, True)}
    steps = {name: timing.timed(t.forward, t.backward, t.step) for name, t in both.items()}
    times = timing.rounds(steps, seconds, warm_up=5)
    totals = {name: timing.totals(each) for name, each in times.items()}
    return {
        "name": case.name,
        "threads": threads,
        "rounds": len(totals["plain"]),
        "ratio": timing.ratio(totals["observed"], totals["plain"]),
        "milliseconds": {name: 1e3 * timing.quantile(each, 0.5) for name, each in totals.items()},
        "phases": {
            name: [1e3 * timing.quantile([part[i] for part in each], 0.5) for i in range(3)]
            for name, each in times.items()
        },
    }


def main() -> None:
    """Measure, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row")
    options = parser.parse_args()
    rows = [
        timing.in_a_fresh_process(measure, case, threads, options.seconds)
        for case in CASES
        for threads in (1, 2)
    ]
    record = {"date": datetime.date.today().isoformat(), "machine": machine(), "rows": rows}
    write_json(RESULTS, record)
    print(table(record))


if __name__ == "__main__":
    main()
