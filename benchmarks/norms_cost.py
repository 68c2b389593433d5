"""Measure the cost of the norms of single samples: a training step with them over one without.

    .venv/bin/python -m benchmarks.norms_cost --out norms.json       # a minute

Both train the same model on the same batches with SGD, in turn, on the workloads of `varreg bench`.
Medians of paired ratios, with the 10 % and 90 % quantiles.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch
from tools.tables import cost as tables

import varreg
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import EXACT
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import WORKLOADS, YARDSTICK, Workload
from varreg.lab.environment import machine


def cost(w: Workload, seconds: float) -> timing.Ratio:
    """Return the time of a step with norms over that of one without."""
    runs = {}
    for name in ("without", "with"):
        training = Training(w, "SGD", EXACT)
        assert training.observer is not None
        if name == "with":
            training.observer.remove()
            training.observer = varreg.observe(training.observer.model, norms=True)
        runs[name] = timing.timed(training.forward, training.backward, training.step)
    times = timing.rounds(runs, seconds)
    totals = {name: [sum(row) for row in rows] for name, rows in times.items()}
    return timing.ratio(totals["with"], totals["without"])


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="for each workload")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {}
    for name in YARDSTICK:
        found[name] = str(cost(WORKLOADS[name], options.seconds))
        print(f"{name}: {found[name]}", flush=True)
    about = f"{datetime.date.today()}, {machine()}, {options.threads} threads"
    saved = {"ratios": found, "about": about}
    print(f"\n{tables.norms(saved)}\n\n{about}")
    if options.out:
        options.out.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
