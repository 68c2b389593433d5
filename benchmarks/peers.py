"""Compare all tools that compute the second moment of per-sample gradients, on every workload,
interleaved in one run.

    make bench                                      # all workloads, about 10 minutes
    python -m benchmarks.peers --only LeNet --seconds 20

A step is zero_grad, forward, backward (with moments) and SGD step. The figure is the median over
rounds of the ratio to the plain step of the same round, with the 10 % and 90 % quantiles; memory is
the peak that a fresh process needs for it, as a ratio to the plain step's. Peers compute the second
moment only. Before it is timed, each tool's second moments of the first step are compared with
those of a loop over samples: a tool that raises, misses a parameter or is off is shown as such, not
timed.
"""

from __future__ import annotations

import argparse
import datetime
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tools.tables import speed
from torch import Tensor, nn

import varreg
from varreg.lab.bench import timing
from varreg.lab.bench.workloads import WORKLOADS, Workload, built, part
from varreg.lab.environment import machine
from varreg.lab.store import write_json

Step = Callable[[], None]
Read = Callable[[], list[Tensor]]
"""Returns the second moments (1/m) Σ g_i² of the last step, parameter by parameter."""


def _setup(w: Workload) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Return model, optimizer, inputs and targets."""
    model, x, y = built(w)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9), x, y


def plain(w: Workload) -> tuple[Step, Read]:
    """Return a step without moments."""
    model, optimizer, x, y = _setup(w)

    def step() -> None:
        optimizer.zero_grad()
        w.loss(model(x), y).backward()
        optimizer.step()

    return step, list


def _varreg(groups: int | None) -> Callable[[Workload], tuple[Step, Read]]:
    """Return what makes a step with varreg."""

    def make(w: Workload) -> tuple[Step, Read]:
        model, optimizer, x, y = _setup(w)
        varreg.observe(model, groups=groups)

        def step() -> None:
            optimizer.zero_grad()
            w.loss(model(x), y).backward()
            optimizer.step()

        def read() -> list[Tensor]:
            return [
                m.second_moment for p in model.parameters() if (m := varreg.moments(p)) is not None
            ]

        return step, read

    return make


def _backpack(name: str) -> Callable[[Workload], tuple[Step, Read]]:
    """Return what makes a step with an extension of BackPACK."""

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
                return [
                    len(x) * p.sum_grad_squared
                    for p in model.parameters()
                    if hasattr(p, "sum_grad_squared")
                ]
            scale = len(x) ** 2  # of the gradients of a mean loss
            return [
                p.variance * scale + p.grad.square()
                for p in model.parameters()
                if hasattr(p, "variance")
            ]

        return step, read

    return make


def opacus(w: Workload) -> tuple[Step, Read]:
    """Return a step with Opacus."""
    from opacus.grad_sample import GradSampleModule

    model, _, x, y = _setup(w)
    wrapped = GradSampleModule(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        w.loss(wrapped(x), y).backward()
        for p in wrapped.parameters():
            p.second_moment = p.grad_sample.square().mean(0)
            p.grad_sample = None
        optimizer.step()

    return step, lambda: [p.second_moment for p in wrapped.parameters()]


def vmap(w: Workload) -> tuple[Step, Read]:
    """Return a step with torch.func."""
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
    """Return a step that takes one sample at a time: the definition."""
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


LOOP = "one sample at a time"
ARMS: dict[str, Callable[[Workload], tuple[Step, Read]]] = {
    "plain": plain,
    "varreg": _varreg(None),
    "varreg groups=8": _varreg(8),
    "BackPACK SumGradSquared": _backpack("SumGradSquared"),
    "BackPACK Variance": _backpack("Variance"),
    "vmap(grad)": vmap,
    "Opacus": opacus,
    LOOP: loop,
}


def first_moments(arm: str, w: Workload) -> list[Tensor]:
    """Return the second moments of an arm's first step."""
    step, read = ARMS[arm](w)
    step()
    return read()


def check(actual: list[Tensor], truth: list[Tensor]) -> None:
    """Raise unless second moments are those of the definition."""
    if len(actual) != len(truth):
        raise ValueError(f"gives moments for {len(actual)} of {len(truth)} parameters")
    worst = max(
        float((a - b).norm() / b.norm()) for a, b in zip(actual, truth, strict=True) if b.norm() > 0
    )
    if worst > 1e-2:
        raise ValueError(f"second moments are off by {worst:.0%}")


def said(error: Exception) -> str:
    """Return an error in a few words, for a table."""
    return str(error) if type(error) is ValueError else f"raises {type(error).__name__}"


def measure(w: Workload, arms: list[str], seconds: float) -> dict[str, Any]:
    """Return the ratios of all arms on a workload, and why arms are left out."""
    steps: dict[str, Callable[[], timing.Parts]] = {}
    rows: dict[str, Any] = {}
    truth = first_moments(LOOP, w)
    for name in arms:
        try:
            if name != "plain" and "groups" not in name:
                check(first_moments(name, w), truth)
            steps[name] = timing.timed(ARMS[name](w)[0])
            steps[name]()
        except Exception as error:  # noqa: PERF203
            steps.pop(name, None)
            rows[name] = {"error": said(error)}
    times = {name: timing.totals(each) for name, each in timing.rounds(steps, seconds).items()}
    for name, each in times.items():
        middle = 1e3 * timing.quantile(each, 0.5)
        rows[name] = {
            "ratio": timing.ratio(each, times["plain"]),
            "rounds": len(each),
            "milliseconds": middle,
        }
    return rows


def peak(arm: str, w: Workload) -> timing.Peak:
    """Return the peak memory of an arm in this process, which should be a fresh one."""
    few = w._replace(batch=lambda: part(w.batch(), slice(0, 2)))
    return timing.peak(lambda: plain(few)[0](), lambda: ARMS[arm](w)[0])


def _peak(arm: str, workload: str, threads: int) -> timing.Peak:
    """Return the peak memory of this process, which is a fresh one."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    return peak(arm, WORKLOADS[workload])


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run the workloads whose name contains this")
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="the tools to run"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time per workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    # without --only, not the wide CNN: some tools keep the gradient of every sample
    names = [n for n in WORKLOADS if (options.only in n if options.only else "×8" not in n)]
    if not names:
        parser.error(f"no workload contains {options.only!r}; there are: {', '.join(WORKLOADS)}")
    arms = ["plain", *(a for a in options.arms if a != "plain")]
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        rows = measure(WORKLOADS[name], arms, options.seconds)
        results[name] = {arm: rows[arm] for arm in arms}
        if timing.PEAK_IS_KNOWN and not options.no_memory:
            used = {
                arm: timing.in_a_fresh_process(_peak, arm, name, options.threads)
                for arm in arms
                if "error" not in rows[arm]
            }
            for arm, peak_of_arm in used.items():
                rows[arm]["memory"] = peak_of_arm.training / used["plain"].training
        print(f"{name}: measured", flush=True)
    head = f"{datetime.date.today()}, {machine()}"
    saved = {"measured": head, "results": results}
    print(f"\nMeasured {head}.\n\n{speed.peers(saved)}")
    if options.json:
        write_json(options.json, saved)


if __name__ == "__main__":
    main()
