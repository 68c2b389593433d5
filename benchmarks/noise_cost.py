"""Measure the cost of the noise scale and AdaScale: their time as a share of a training step.

    .venv/bin/python -m benchmarks.noise_cost --out benchmarks/results/noise.json  # half a minute

In each round, one training step with momentum on an observed model is followed by an update of the
noise scale, one of its ℓ1 version, and AdaScale's measurement. A share is the time of one of these
over that of the whole step in the same round: medians, with the 10 % and 90 % quantiles.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import torch
from tools.tables import cost

import varreg
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import EXACT
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import WORKLOADS, YARDSTICK, Workload
from varreg.lab.environment import machine
from varreg.lab.store import write_json

PARTS = ("NoiseScale", "NoiseScale, ℓ1", "AdaScale")


def shares(w: Workload, seconds: float) -> dict[str, timing.Ratio]:
    """Return the share of each part, in percent."""
    training = Training(w, "SGD:momentum=0.9", EXACT)
    assert training.observer is not None
    noise = varreg.NoiseScale(training.observer)
    l1 = varreg.NoiseScale(training.observer, l1=True)
    ada = varreg.AdaScale(training.optimizer, base_batch=1)
    phases = (training.forward, training.backward, training.step)
    step = timing.timed(*phases, noise.update, l1.update, ada._measure)
    times = timing.rounds({"": step}, seconds)[""]
    whole = [sum(row[:3]) for row in times]
    return {
        name: timing.ratio([100 * row[3 + i] for row in times], whole)
        for i, name in enumerate(PARTS)
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each workload")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    for name in YARDSTICK:
        rows[name] = shares(WORKLOADS[name], options.seconds)
        print(f"{name}: measured", flush=True)
    saved = {"measured": f"{datetime.date.today()}, {machine()}", "rows": rows}
    print(f"\n{cost.noise(saved)}\n\n{saved['measured']}")
    if options.out:
        write_json(options.out, saved)


if __name__ == "__main__":
    main()
