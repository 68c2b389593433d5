"""Measure the cost of a regularized update: its time as a share of a whole plain training step, and
the memory of its state.

    .venv/bin/python -m benchmarks.optimizer_cost              # about a minute for each workload

A round is one plain training step (zero_grad, forward, backward, SGD step) and, for every
optimizer, a training step of its own with the model observed, and one with its torch counterpart
without. The share is the time of its `step()` over the whole plain step's; the ratio its whole
training step over its counterpart's: medians over rounds, with the 10 % and 90 % quantiles. State
is counted: numbers kept per parameter element.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tools.tables import speed

import varreg
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import EXACT, PLAIN
from varreg.lab.bench.training import LR, Training
from varreg.lab.bench.workloads import WORKLOADS, Workload
from varreg.lab.environment import machine
from varreg.lab.store import write_json
from varreg.optim import REGULARIZED

VARIANTS = {
    "SGD": {
        "momentum": "momentum=0.9",
        "momentum, calibrated": "momentum=0.9,calibrate=True",
        "per tensor": "per=tensor",
    },
    "Adam": {"direct": "variance=direct", "amsgrad": "amsgrad=True"},
    "RMSprop": {
        "momentum": "momentum=0.9",
        "centered, direct": "centered=True,variance=direct",
    },
}


def specifications() -> Iterator[tuple[str, str]]:
    """Yield a name and a specification for every optimizer, and for every variant of it."""
    for name in REGULARIZED:
        yield name, f"VR{name}"
        for variant, options in VARIANTS.get(name, {}).items():
            yield f"{name}, {variant}", f"VR{name}:{options}"


SPECS = dict(specifications())
WRAPPED = "wrapped RAdam"
STEP = 2  # among the phases of a training step


def state_per_element(optimizer: torch.optim.Optimizer) -> float:
    """Numbers in the state for each number in the parameters, rounded away from step counts."""
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    kept = sum(
        v.numel()
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.dim()
    )
    return float(round(kept / elements, 2))


def trainings(w: Workload) -> dict[str, Training]:
    made = {}
    for name, spec in SPECS.items():
        made[f"VR {name}"], made[name] = Training(w, spec, EXACT), Training(w, spec, PLAIN)
    for name, arm in ((f"VR {WRAPPED}", EXACT), (WRAPPED, PLAIN)):
        training = Training(w, "VRSGD", arm)
        inner = torch.optim.RAdam(training.model.parameters(), LR)
        training.optimizer = varreg.VarianceRegularized(inner) if arm == EXACT else inner
        made[name] = training
    return made


def measure(w: Workload, seconds: float) -> dict[str, Any]:
    made = trainings(w)
    steps = {
        PLAIN: Training(w, "VRSGD", PLAIN).timed(),
        **{name: training.timed() for name, training in made.items()},
    }
    times = timing.rounds(steps, seconds, least=10)
    whole = {name: timing.totals(found) for name, found in times.items()}
    return {
        name: {
            "state": state_per_element(training.optimizer),
            "rounds": len(whole[name]),
            "share": timing.ratio([parts[STEP] for parts in times[name]], whole[PLAIN]),
            "ratio": timing.ratio(whole[name], whole[name.removeprefix("VR ")]),
        }
        for name, training in made.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["CNN, batch 100", "LeNet", "MLP"],
        help="the workloads whose names contain one of these",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time per workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    head = f"{datetime.date.today()}, {machine()}"
    results = {
        n: measure(w, options.seconds)
        for n, w in WORKLOADS.items()
        if any(part in n for part in options.only)
    }
    if not results:
        parser.error(f"no workload contains {options.only}; there are: {', '.join(WORKLOADS)}")
    saved = {"measured": head, "results": results}
    print(f"Measured {head}.\n\n{speed.optimizers(saved)}")
    if options.json:
        write_json(options.json, saved)


if __name__ == "__main__":
    main()
