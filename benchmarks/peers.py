"""Every tool that can give the second moment of per-sample gradients, on every workload, interleaved in one run.

    make bench                                      # all workloads, about 10 minutes
    python -m benchmarks.peers --only LeNet --seconds 20

A step is zero_grad, forward, backward (with moments) and SGD step. The figure is the median over rounds of the ratio to the plain
step of the same round, with the 10 % and 90 % quantiles; memory is the peak that a fresh process needs beyond its idle state, as a
ratio to the plain step's. Peers compute the second moment only. Before it is timed, each tool's second moments of the first step are
compared with those of a loop over samples: a tool that raises, misses a parameter or is off is shown as such, not timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varreg
from benchmarks.workloads import WORKLOADS, Workload

Step = Callable[[], None]
Read = Callable[[], list[Tensor]]  # the second moments (1/m) Σ g_i² of the last step, parameter by parameter


def _setup(w: Workload) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = w.make()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), *w.batch()


def plain(w: Workload) -> tuple[Step, Read]:
    model, optimizer, x, y = _setup(w)

    def step() -> None:
        optimizer.zero_grad()
        w.loss(model(x), y).backward()
        optimizer.step()

    return step, list


def _varreg(groups: int | None) -> Callable[[Workload], tuple[Step, Read]]:
    def make(w: Workload) -> tuple[Step, Read]:
        model, optimizer, x, y = _setup(w)
        varreg.observe(model, groups=groups)

        def step() -> None:
            optimizer.zero_grad()
            w.loss(model(x), y).backward()
            optimizer.step()

        def read() -> list[Tensor]:
            return [m.second_moment for p in model.parameters() if (m := varreg.moments(p)) is not None]

        return step, read

    return make


def _backpack(name: str) -> Callable[[Workload], tuple[Step, Read]]:
    def make(w: Workload) -> tuple[Step, Read]:
        import backpack
        from backpack import extensions

        model, optimizer, x, y = _setup(w)
        model, loss = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())
        extension = getattr(extensions, name)()

        def step() -> None:
            optimizer.zero_grad()
            with backpack.backpack(extension):
                loss(model(x), y).backward()
            optimizer.step()

        def read() -> list[Tensor]:
            if name == "SumGradSquared":
                return [len(x) * p.sum_grad_squared for p in model.parameters() if hasattr(p, "sum_grad_squared")]
            scale = len(x) ** 2  # of the gradients of a mean loss
            return [p.variance * scale + p.grad.square() for p in model.parameters() if hasattr(p, "variance")]

        return step, read

    return make


def opacus(w: Workload) -> tuple[Step, Read]:
    from opacus.grad_sample import GradSampleModule

    model, _, x, y = _setup(w)
    wrapped = GradSampleModule(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        w.loss(wrapped(x), y).backward()
        for p in wrapped.parameters():
            p.second_moment = p.grad_sample.square().mean(0)
            p.grad_sample = None
        optimizer.step()

    return step, lambda: [p.second_moment for p in wrapped.parameters()]


def vmap(w: Workload) -> tuple[Step, Read]:
    model, optimizer, x, y = _setup(w)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return w.loss(torch.func.functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    moments: dict[str, Tensor] = {}

    def step() -> None:
        optimizer.zero_grad()
        grads = per_sample({n: p.detach() for n, p in model.named_parameters()}, x, y)
        for n, p in model.named_parameters():
            p.grad = grads[n].mean(0)
            moments[n] = grads[n].square_().mean(0)
        optimizer.step()

    return step, lambda: list(moments.values())


def loop(w: Workload) -> tuple[Step, Read]:
    model, optimizer, x, y = _setup(w)

    squares = [torch.zeros_like(p) for p in model.parameters()]

    def step() -> None:
        totals = [torch.zeros_like(p) for p in model.parameters()]
        torch._foreach_zero_(squares)
        for i in range(len(x)):
            optimizer.zero_grad()
            w.loss(model(x[i : i + 1]), y[i : i + 1]).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            torch._foreach_add_(totals, grads)
            torch._foreach_addcmul_(squares, grads, grads)
        for p, total in zip(model.parameters(), totals, strict=True):
            p.grad = total / len(x)
        optimizer.step()

    return step, lambda: [q / len(x) for q in squares]


ARMS: dict[str, Callable[[Workload], tuple[Step, Read]]] = {
    "plain": plain,
    "varreg": _varreg(None),
    "varreg groups=8": _varreg(8),
    "BackPACK SumGradSquared": _backpack("SumGradSquared"),
    "BackPACK Variance": _backpack("Variance"),
    "vmap(grad)": vmap,
    "Opacus": opacus,
    "one sample at a time": loop,
}


def _first_moments(arm: str, w: Workload) -> list[Tensor]:
    step, read = ARMS[arm](w)
    step()
    return read()


def _check(actual: list[Tensor], truth: list[Tensor]) -> None:
    if len(actual) != len(truth):
        raise ValueError(f"gives moments for {len(actual)} of {len(truth)} parameters")
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(actual, truth, strict=True) if b.norm() > 0)
    if worst > 1e-2:
        raise ValueError(f"second moments are off by {worst:.0%}")


def measure(w: Workload, arms: list[str], seconds: float) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    rows: dict[str, Any] = {}
    truth = _first_moments("one sample at a time", w)
    for name in arms:
        try:
            if name != "plain" and "groups" not in name:
                _check(_first_moments(name, w), truth)
            steps[name], _ = ARMS[name](w)
            for _ in range(2):
                steps[name]()
        except Exception as error:  # noqa: PERF203
            steps.pop(name, None)
            rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    times: dict[str, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["plain"]) < 5:
        for name, step in steps.items():
            before = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - before)
    for name in steps:
        ratios = torch.tensor([a / b for a, b in zip(times[name], times["plain"], strict=True)], dtype=torch.float64)
        low, middle, high = torch.quantile(ratios, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        rows[name] = {
            "ratio": middle,
            "low": low,
            "high": high,
            "rounds": len(ratios),
            "milliseconds": 1e3 * sorted(times[name])[len(ratios) // 2],
        }
    return rows


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_memory(arm: str, workload: str) -> int:
    """Bytes that a process needs at its peak beyond its idle state, for three steps (Linux)."""
    w = WORKLOADS[workload]
    _setup(w)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    step, _ = ARMS[arm](w)
    for _ in range(3):
        step()
    return _status("VmHWM") - before


def memory_in_a_fresh_process(arm: str, workload: str) -> int | None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", "--memory-of", arm, "--only", workload]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), cpu
        )
    return f"{cpu}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"


def table(results: dict[str, dict[str, Any]], arms: list[str]) -> str:
    lines = ["| tool | " + " | ".join(results) + " |", "| --- |" + " --- |" * len(results)]
    for arm in arms:
        cells = []
        for rows in results.values():
            row = rows[arm]
            if "error" in row:
                cells.append(
                    row["error"].split(": ", 1)[-1]
                    if row["error"].startswith("ValueError: ")
                    else f"raises {row['error'].split(':')[0]}"
                )
            else:
                memory = f", memory {row['memory']:.2f}" if row.get("memory") else ""
                cells.append(f"{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f}){memory}")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the workloads whose name contains this")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="the tools to run")
    parser.add_argument("--seconds", type=float, default=60.0, help="time per workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.memory_of:
        print(peak_memory(options.memory_of, options.only))
        return
    names = [n for n in WORKLOADS if not options.only or options.only in n]
    if not names:
        parser.error(f"no workload contains {options.only!r}; there are: {', '.join(WORKLOADS)}")
    arms = ["plain", *(a for a in options.arms if a != "plain")]
    head = f"{datetime.date.today()}, {machine()}"
    print(
        f"{head}\nstep time as a ratio to the plain step: median (10 %–90 %); peak memory as a ratio to the plain step's\n",
        flush=True,
    )
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        results[name] = measure(WORKLOADS[name], arms, options.seconds)
        if not options.no_memory:
            base = memory_in_a_fresh_process("plain", name)
            for arm in arms:
                if "error" not in results[name][arm]:
                    used = memory_in_a_fresh_process(arm, name)
                    results[name][arm]["memory"] = used / base if used and base else None
        print(table({name: results[name]}, arms), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": head, "results": results}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
