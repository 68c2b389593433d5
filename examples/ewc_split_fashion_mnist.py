"""Elastic weight consolidation on Split Fashion-MNIST: which importance protects old tasks best?

    python examples/ewc_split_fashion_mnist.py --data-dir ~/data --out ewc.json    # 10 minutes
    python examples/ewc_split_fashion_mnist.py --table ewc.json                    # as Markdown
    python examples/ewc_split_fashion_mnist.py --quick                             # random data

If it is interrupted, the same command goes on where it was.

Five tasks of two classes each come one after the other: is it the first or the second class? All
tasks share the outputs, and later ones overwrite what earlier ones have learned. Each arm adds
(strength/2) Σ_p F_p (θ_p − θ*_p)² to the loss of later tasks, θ* being the parameters at the end of
a task, and F one of: the exact, sampled or empirical diagonal Fisher (Kirkpatrick et al. 2017,
`varreg.fisher`), the squared gradients of batches, Adam's second moment, which is free, or 1. An
arm's F is divided by its mean at the end of the first task, so that strengths mean the same for
all. Strengths are powers of ten, tuned on a validation split with seeds of their own; the test
split is read once.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import varreg

FISHERS = ("exact", "sampled", "empirical")
ARMS = (*FISHERS, "squared batch gradients", "Adam's second moment", "uniform")
TASKS, CLASSES = 5, 2
Part = tuple[torch.Tensor, torch.Tensor]
Task = dict[str, Part]


def mlp(features: int, width: int) -> nn.Sequential:
    """Return an MLP whose outputs all tasks share."""
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


# ---- data ----------------------------------------------------------------------------------------


def read_idx(path: Path) -> torch.Tensor:
    """Return the numbers in an IDX file."""
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return torch.from_numpy(
        np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy()
    )


def fashion_mnist(folder: Path) -> list[Part]:
    """Return images and labels, of training and test."""
    found = []
    for part in ("train", "t10k"):
        x, y = (
            read_idx(folder / f"{part}-{what}.gz")
            for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        found.append((x.flatten(1).float().div_(255).sub_(0.286).div_(0.353), y.long()))
    return found


def random_clusters(n: int = 60, features: int = 20) -> list[Part]:
    """Return data of the same form without meaning, for a trial: a cluster for each class."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(TASKS * CLASSES, features, generator=g)
    out = []
    for size in (n, n // 2):
        y = torch.arange(TASKS * CLASSES).repeat_interleave(size)
        out.append((centres[y] + torch.randn(len(y), features, generator=g), y))
    return out


def split(data: list[Part], validation: float = 0.2) -> list[Task]:
    """Return, for each task, its training, validation and test samples, labels 0 and 1."""
    (x, y), (x_test, y_test) = data
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    tasks = []
    for t in range(TASKS):
        mine, test = y // CLASSES == t, y_test // CLASSES == t
        xs, ys = x[mine], y[mine] % CLASSES
        n = int(len(ys) * (1 - validation))
        tasks.append(
            {"train": (xs[:n], ys[:n]), "validation": (xs[n:], ys[n:]),
             "test": (x_test[test], y_test[test] % CLASSES)}
        )  # fmt: skip
    return tasks


# ---- training ------------------------------------------------------------------------------------


def importance(
    arm: str, net: nn.Module, batches: list[Part], optimizer: Any, seed: int
) -> dict[str, torch.Tensor]:
    """Return F of an arm at the end of a task."""
    if arm in FISHERS:
        draws = torch.Generator().manual_seed(seed)
        return varreg.fisher(net, batches, arm, generator=draws, progress=False)
    names = dict(net.named_parameters())
    if arm == "Adam's second moment":
        return {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in names.items()}
    if arm == "uniform":
        return {n: torch.ones_like(p) for n, p in names.items()}
    total = {n: torch.zeros_like(p) for n, p in names.items()}
    for x, y in batches:
        grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(names.values()))
        for n, g in zip(names, grads, strict=True):
            total[n] += g.square() / len(batches)
    return total


def accuracy(net: nn.Module, tasks: list[Task], part: str) -> float:
    """Return the mean accuracy over all tasks, in percent."""
    found: list[float] = []
    with torch.no_grad():
        for task in tasks:
            x, y = task[part]
            found.append(100 * (net(x).argmax(1) == y).float().mean().item())
    return statistics.mean(found)


def run(
    arm: str, strength: float, seed: int, tasks: list[Task], part: str, options: Any
) -> tuple[float, float]:
    """Learn all tasks in turn; return the accuracy over all of them, and seconds spent on F."""
    torch.manual_seed(seed)
    net = mlp(tasks[0]["train"][0].shape[1], options.width)
    names = dict(net.named_parameters())
    # Σ_tasks F (θ − θ*)²/2 has the gradient (ΣF)·θ − ΣF·θ*
    stiff = {n: torch.zeros_like(p) for n, p in names.items()}
    pull = {n: torch.zeros_like(p) for n, p in names.items()}
    unit, seconds = None, 0.0
    for t, task in enumerate(tasks):
        x, y = task["train"]
        optimizer = torch.optim.Adam(net.parameters(), lr=options.lr)
        for _ in range(options.steps):
            i = torch.randint(len(y), (options.batch,))
            optimizer.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            for n, p in names.items():
                if t and strength and p.grad is not None:
                    p.grad += strength * (stiff[n] * p.detach() - pull[n])
            optimizer.step()
        if strength and t < TASKS - 1:
            began = time.perf_counter()
            batches = list(zip(x.split(options.batch), y.split(options.batch), strict=True))
            found = importance(arm, net, batches, optimizer, seed)
            seconds += time.perf_counter() - began
            if unit is None:
                unit = sum(f.sum() for f in found.values()) / sum(f.numel() for f in found.values())
            for n, p in names.items():
                stiff[n] += found[n] / unit
                pull[n] += found[n] / unit * p.detach()
    return accuracy(net, tasks, part), seconds


class Runs:
    """Runs that are kept in a file beside the result: an interrupted experiment goes on there."""

    def __init__(self, tasks: list[Task], options: Any):
        self.tasks, self.options = tasks, options
        self.path = options.out and options.out.with_suffix(".runs.json")
        self.known: dict[str, tuple[float, float]] = {}
        if self.path and self.path.exists():
            self.known = json.loads(self.path.read_text())

    def get(self, arm: str, strength: float, seed: int, part: str) -> tuple[float, float]:
        """Return what a run gives; do it, if it was not done."""
        o = self.options
        how = f"steps={o.steps} batch={o.batch} width={o.width} lr={o.lr:g} quick={o.quick}"
        key = f"{arm}, strength {strength:g}, seed {seed}, {part}, {how}"
        if key not in self.known:
            self.known[key] = run(arm, strength, seed, self.tasks, part, o)
            if self.path:
                beside = self.path.with_suffix(".part")
                beside.write_text(json.dumps(self.known, indent=1))
                beside.replace(self.path)
        return self.known[key]


def experiment(tasks: list[Task], options: Any) -> dict[str, Any]:
    """Tune each arm's strength on the validation split, then judge it on the test split."""
    arms, begun = {}, time.monotonic()
    runs = Runs(tasks, options)
    for arm in ("none", *ARMS):
        tuned: dict[float, float] = {}
        ahead = [0.0] if arm == "none" else list(options.strengths)
        while ahead:
            strength = ahead.pop(0)
            found = [
                runs.get(arm, strength, 1000 + s, "validation")[0]
                for s in range(options.tuning_seeds)
            ]
            tuned[strength] = statistics.mean(found)
            best = max(tuned, key=lambda s: tuned[s])
            if not ahead and best and len(tuned) < options.most:  # go on beyond an end of the range
                ahead = {max(tuned): [10 * best], min(tuned): [best / 10]}.get(best, [])
        judged = [runs.get(arm, best, s, "test") for s in range(options.seeds)]
        scores, seconds = zip(*judged, strict=True)
        arms[arm] = {
            "strength": best,
            "validation": {f"{s:g}": v for s, v in tuned.items()},
            "test": scores,
            "seconds": statistics.median(seconds) / (TASKS - 1),
        }
        took = time.monotonic() - begun
        print(f"{arm:25} strength {best:<8g} test {statistics.mean(scores):.2f} %  ({took:.0f} s)",
              flush=True)  # fmt: skip
    return arms


# ---- what comes out ------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    rows = ["| importance | strength | test accuracy, % | against exact | seconds per task |",
            "| --- | --- | --- | --- | --- |"]  # fmt: skip
    exact = result["arms"]["exact"]["test"]
    for arm, found in result["arms"].items():
        scores = found["test"]
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
        gaps = [a - b for a, b in zip(scores, exact, strict=True)]
        spread = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        against = "" if arm == "exact" else f"{statistics.mean(gaps):+.2f} ± {spread:.2f}"
        strength = "" if arm == "none" else f"{found['strength']:g}"
        spent = f"{found['seconds']:.2f}" if arm in (*FISHERS, "squared batch gradients") else ""
        mean = f"{statistics.mean(scores):.2f} ± {error:.2f}"
        rows.append(f"| {arm} | {strength} | {mean} | {against} | {spent} |")
    return "\n".join(rows)


def main() -> None:
    """Run the experiment, or show a saved one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("VARREG_DATA", ".")))
    parser.add_argument("--out", type=Path, help="save the result here, as JSON")
    parser.add_argument("--table", type=Path, help="print a saved result as Markdown, and stop")
    parser.add_argument("--quick", action="store_true", help="random data, few steps")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="for each task")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    options.strengths, options.most = [10.0**k for k in range(5)], 10
    if options.quick:
        options.seeds, options.tuning_seeds, options.steps = 2, 1, 20
        options.batch, options.width, options.strengths = 32, 16, [0.01, 1.0]
        options.most = 3
        tasks = split(random_clusters())
    else:
        tasks = split(fashion_mnist(options.data_dir / "fashion-mnist"))
    arms = experiment(tasks, options)
    kept = {k: v for k, v in vars(options).items() if k not in ("data_dir", "out", "table")}
    result = {
        "command": shlex.join(["python", "examples/ewc_split_fashion_mnist.py", *sys.argv[1:]]),
        "arms": arms,
        "options": kept,
        "date": str(datetime.date.today()),
        "versions": {"varreg": varreg.__version__, "torch": torch.__version__,
                     "python": platform.python_version()},
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
