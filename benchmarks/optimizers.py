"""What a regularized update costs: its time as a share of a whole plain training step, and the memory of its state.

    .venv/bin/python -m benchmarks.optimizers              # about a minute for each workload

A round is one plain training step (zero_grad, forward, backward, SGD step) and, for every optimizer, a training step of its own with the
model observed, and one with its torch counterpart without. The share is the time of its `step()` over the whole plain step's; the ratio its whole
training step over its counterpart's: medians over rounds, with the 10 % and 90 % quantiles. State is counted: numbers kept per parameter element.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varreg
from benchmarks.peers import machine, plain
from benchmarks.workloads import WORKLOADS, Workload

Make = Callable[[Any], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Make, Make]] = {
    "SGD": (lambda p: varreg.VRSGD(p, 1e-3), lambda p: torch.optim.SGD(p, 1e-3)),
    "SGD, momentum": (lambda p: varreg.VRSGD(p, 1e-3, 0.9), lambda p: torch.optim.SGD(p, 1e-3, 0.9)),
    "SGD, per tensor": (lambda p: varreg.VRSGD(p, 1e-3, per="tensor"), lambda p: torch.optim.SGD(p, 1e-3)),
    "Adam": (lambda p: varreg.VRAdam(p, 1e-3), lambda p: torch.optim.Adam(p, 1e-3)),
    "Adam, direct": (lambda p: varreg.VRAdam(p, 1e-3, variance="direct"), lambda p: torch.optim.Adam(p, 1e-3)),
    "Adam, amsgrad": (lambda p: varreg.VRAdam(p, amsgrad=True), lambda p: torch.optim.Adam(p, amsgrad=True)),
    "AdamW": (lambda p: varreg.VRAdamW(p, 1e-3), lambda p: torch.optim.AdamW(p, 1e-3)),
    "NAdam": (lambda p: varreg.VRNAdam(p, 1e-3), lambda p: torch.optim.NAdam(p, 1e-3)),
    "RMSprop": (lambda p: varreg.VRRMSprop(p, 1e-3), lambda p: torch.optim.RMSprop(p, 1e-3)),
    "RMSprop, momentum": (
        lambda p: varreg.VRRMSprop(p, 1e-3, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
    ),
    "RMSprop, centered, direct": (
        lambda p: varreg.VRRMSprop(p, 1e-3, centered=True, variance="direct"),
        lambda p: torch.optim.RMSprop(p, 1e-3, centered=True),
    ),
    "Adagrad": (lambda p: varreg.VRAdagrad(p, 1e-3), lambda p: torch.optim.Adagrad(p, 1e-3)),
    "Adadelta": (lambda p: varreg.VRAdadelta(p, 1e-3), lambda p: torch.optim.Adadelta(p, 1e-3)),
    "wrapped RAdam": (lambda p: varreg.VarianceRegularized(torch.optim.RAdam(p, 1e-3)), lambda p: torch.optim.RAdam(p, 1e-3)),
}


def state_per_element(optimizer: torch.optim.Optimizer) -> float:
    """Numbers in the state for each number in the parameters, rounded away from step counts."""
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    kept = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    return float(round(kept / elements, 2))


def _backward(w: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    w.loss(model(x), y).backward()


def measure(w: Workload, seconds: float) -> dict[str, Any]:
    whole, _ = plain(w)
    arms: dict[str, tuple[torch.optim.Optimizer, Callable[[], None]]] = {}
    for name, pair in PAIRS.items():
        for i, make in enumerate(pair):
            torch.manual_seed(0)
            model, (x, y) = w.make(), w.batch()
            optimizer = make(model.parameters())
            if i == 0:
                varreg.observe(model)

            arms[f"{'VR ' if i == 0 else ''}{name}"] = optimizer, partial(_backward, w, model, optimizer, x, y)
    times: dict[str, list[float]] = {name: [] for name in ("plain", *arms)}
    whole_times: dict[str, list[float]] = {name: [] for name in arms}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["plain"]) < 10:
        before = time.perf_counter()
        whole()
        times["plain"].append(time.perf_counter() - before)
        for name, (optimizer, backward) in arms.items():
            start_of_step = time.perf_counter()
            backward()
            before = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            times[name].append(end - before)
            whole_times[name].append(end - start_of_step)
    rows: dict[str, dict[str, Any]] = {}
    for name, (optimizer, _) in arms.items():
        rows[name] = {"state": state_per_element(optimizer), "rounds": len(times["plain"]) - 2}
        rows[name]["share"] = _quantiles(times[name], times["plain"])
        rows[name]["ratio"] = _quantiles(whole_times[name], whole_times[name.removeprefix("VR ")])
    return rows


def _quantiles(these: list[float], over: list[float]) -> list[float]:
    """10 %, 50 % and 90 % of the ratios, round by round; the first two rounds warm up."""
    ratios = torch.tensor([a / b for a, b in zip(these[2:], over[2:], strict=True)], dtype=torch.float64)
    return [round(q, 4) for q in torch.quantile(ratios, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()]


def table(results: dict[str, dict[str, Any]]) -> str:
    """`step()` in percent of a plain training step, then the whole training step over the counterpart's, for each workload."""
    lines = [f"| optimizer | {' | '.join(results)} | state: ours | torch's |", "| --- |" + " --- |" * (len(results) + 2)]
    for name in PAIRS:
        cells = []
        for rows in results.values():
            low, middle, high = rows[f"VR {name}"]["ratio"]
            update, theirs = (100 * rows[key]["share"][1] for key in (f"VR {name}", name))
            spread = "–".join(f"{100 * q:.1f}" for q in rows[f"VR {name}"]["share"][::2])
            cells.append(f"**{update:.1f} %** ({spread}), torch's {theirs:.1f} %; **{middle:.2f}** ({low:.2f}–{high:.2f})")
        first = next(iter(results.values()))
        lines.append(f"| {name} | {' | '.join(cells)} | {first[f'VR {name}']['state']:g} | {first[name]['state']:g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=["CNN, batch 100", "LeNet", "MLP"], help="the workloads whose names contain one of these"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time per workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    head = f"{datetime.date.today()}, {machine()}"
    results = {n: measure(w, options.seconds) for n, w in WORKLOADS.items() if any(part in n for part in options.only)}
    if not results:
        parser.error(f"no workload contains {options.only}; there are: {', '.join(WORKLOADS)}")
    print(f"Measured {head}.\n\n{table(results)}")
    if options.json:
        options.json.write_text(json.dumps({"machine": head, "results": results}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
