"""What a regularized update costs: its time as a share of a whole plain training step, and the memory of its state.

    .venv/bin/python -m benchmarks.optimizers              # about a minute for each workload

A round is one plain training step (zero_grad, forward, backward, SGD step) and, for every optimizer, a training step of its own with the
model observed, and one with its torch counterpart without. The share is the time of its `step()` over the whole plain step's; the ratio its whole
training step over its counterpart's: medians over rounds, with the 10 % and 90 % quantiles. State is counted: numbers kept per parameter element.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import torch

import varreg
from varreg.lab import timing
from varreg.lab.bench import EXACT, LR, PLAIN, Training
from varreg.lab.environment import machine
from varreg.lab.store import write_json
from varreg.lab.workloads import WORKLOADS, Workload

SPECS = {
    "SGD": "VRSGD",
    "SGD, momentum": "VRSGD:momentum=0.9",
    "SGD, per tensor": "VRSGD:per=tensor",
    "Adam": "VRAdam",
    "Adam, direct": "VRAdam:variance=direct",
    "Adam, amsgrad": "VRAdam:amsgrad=True",
    "AdamW": "VRAdamW",
    "NAdam": "VRNAdam",
    "RMSprop": "VRRMSprop",
    "RMSprop, momentum": "VRRMSprop:momentum=0.9",
    "RMSprop, centered, direct": "VRRMSprop:centered=True,variance=direct",
    "Adagrad": "VRAdagrad",
    "Adadelta": "VRAdadelta",
}
WRAPPED = "wrapped RAdam"
STEP = 2  # among the phases of a training step


def state_per_element(optimizer: torch.optim.Optimizer) -> float:
    """Numbers in the state for each number in the parameters, rounded away from step counts."""
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    kept = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
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
    steps = {PLAIN: Training(w, "VRSGD", PLAIN).timed(), **{name: training.timed() for name, training in made.items()}}
    times = timing.rounds(steps, seconds, least=10)
    whole = {name: timing.whole(found) for name, found in times.items()}
    return {
        name: {
            "state": state_per_element(training.optimizer),
            "rounds": len(whole[name]),
            "share": timing.ratio([parts[STEP] for parts in times[name]], whole[PLAIN]),
            "ratio": timing.ratio(whole[name], whole[name.removeprefix("VR ")]),
        }
        for name, training in made.items()
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """`step()` in percent of a plain training step, then the whole training step over the counterpart's, for each workload."""
    lines = [f"| optimizer | {' | '.join(results)} | state: ours | torch's |", "| --- |" + " --- |" * (len(results) + 2)]
    for name in (*SPECS, WRAPPED):
        cells = []
        for rows in results.values():
            middle, low, high = rows[f"VR {name}"]["ratio"]
            update, theirs = (100 * rows[key]["share"].middle for key in (f"VR {name}", name))
            spread = "–".join(f"{100 * q:.1f}" for q in rows[f"VR {name}"]["share"][1:])
            cells.append(f"**{update:.1f} %** ({spread}), torch's {theirs:.1f} %; **{middle:.2f}** ({low:.2f}–{high:.2f})")
        first = next(iter(results.values()))
        lines.append(f"| {name} | {' | '.join(cells)} | {first[f'VR {name}']['state']:g} | {first[name]['state']:g} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=["CNN", "LeNet", "MLP"], help="the workloads whose names contain one of these"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time per workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    head = f"{datetime.date.today()}, {machine()}"
    results = {n: measure(w, options.seconds) for n, w in WORKLOADS.items() if any(part in n for part in options.only)}
    if not results:
        parser.error(f"no workload contains {options.only}; there are: {', '.join(WORKLOADS)}")
    print(f"Measured {head}.\n\n{table(results)}")
    if options.json:
        write_json(options.json, {"measured": head, "results": results})


if __name__ == "__main__":
    main()
