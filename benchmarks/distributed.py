"""Measure the cost of variance regularization under DistributedDataParallel and fully_shard: the
time of a step over that of a plain one, and the bytes that are reduced.

    .venv/bin/python -m benchmarks.distributed             # about three minutes

Every process has a part of the global batch and one thread. A round is, between barriers, a step
with the plain model and one with the observed model (momentum 0.9 both), in turn; ratios are
medians over rounds on rank 0, with the 10 % and 90 % quantiles. Bytes are those given to
collectives of the backward pass and the step, counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.tables import speed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import varreg
from varreg.lab.bench import timing
from varreg.lab.bench.workloads import WORKLOADS, Workload, built
from varreg.lab.environment import machine
from varreg.lab.store import write_json

NAMES = ("paper's CNN, batch 100", "LeNet on CIFAR, batch 100")
ARMS = ("plain", "exact", "groups=8")


def build(w: Workload, arm: str, sharded: bool, rank: int, world: int) -> Callable[[], None]:
    """Return a training step."""
    net, x, y = built(w)
    n = len(x) // world
    x, y = x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]
    model: nn.Module = net
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif world > 1:
        model = DistributedDataParallel(net)
    if arm != "plain":
        varreg.observe(net, groups=None if arm == "exact" else 8)
    make = torch.optim.SGD if arm == "plain" else varreg.VRSGD
    optimizer = make(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        w.loss(model(x), y).backward()
        optimizer.step()

    return step


def counted(step: Callable[[], None]) -> int:
    """Return the bytes that a step gives to collectives, all-gathers of parameters left out."""
    sent = 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines of its own
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    for event in profile.events() or []:
        if event.name.startswith("gloo:") and "gather" not in event.name:
            sent += 4 * sum(torch.Size(shape).numel() for shape in event.input_shapes if shape)
    return sent


def work(rank: int, world: int, folder: str, name: str, sharded: bool, seconds: float) -> None:
    """Measure all arms in one of the processes; the first one writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    steps = {arm: build(WORKLOADS[name], arm, sharded, rank, world) for arm in ARMS}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    rounds = torch.zeros(1)
    while True:
        for arm, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[arm].append(time.perf_counter() - start)
        rounds[0] = float(sum(map(sum, times.values())) > seconds)
        dist.broadcast(rounds, 0)
        if rounds.item():
            break
    sent = {arm: counted(step) if world > 1 else 0 for arm, step in steps.items()}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({"times": times, "bytes": sent}))
    dist.destroy_process_group()


def measure(name: str, world: int, sharded: bool, seconds: float) -> dict[str, Any]:
    """Return a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (world, folder, name, sharded, seconds), world)
        result = json.loads(Path(folder, "result.json").read_text())
    times = result["times"]
    row: dict[str, Any] = {
        "plain_ms": 1e3 * timing.quantile(times["plain"], 0.5),
        "rounds": len(times["plain"]),
    }
    return {
        **row,
        "bytes": result["bytes"],
        **{arm: timing.ratio(times[arm], times["plain"]) for arm in ARMS[1:]},
    }


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="for each line of the table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distributed.json"))
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rows": {},
    }
    for kind, sharded in (("DDP", False), ("fully_shard", True)):
        for name in NAMES if not sharded else NAMES[:1]:
            for world in options.ranks if not sharded else [n for n in options.ranks if n > 1]:
                row = f"{kind}, {name}, {world}"
                results["rows"][row] = measure(name, world, sharded, options.seconds)
                print(f"{row}: measured", flush=True)
    print(f"\n{results['date']}, {results['machine']}, one thread per process\n")
    print(speed.distributed(results))
    write_json(options.out, results)


if __name__ == "__main__":
    main()
