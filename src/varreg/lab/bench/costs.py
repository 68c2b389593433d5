"""Measure the cost of variance regularization: time, memory and operations of whole training
steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from varreg import memory as scratch
from varreg.lab import specs
from varreg.lab.bench import timing
from varreg.lab.bench.bench_plan import PLAIN, Case, Plan, base_of, groups_of, workload_of
from varreg.lab.bench.single_samples import check_moments
from varreg.lab.bench.timing import Parts, Peak
from varreg.lab.bench.training import Training
from varreg.lab.bench.workloads import Workload, part

PHASES = ("forward", "backward", "step")
Report = Callable[[str, float], None]
"""Called with the part that is being measured, and the share of it that is done."""


def run(plan: Plan, report: Report = lambda name, share: None) -> Iterator[dict[str, Any]]:
    """Yield one row for each workload and optimizer, as soon as it is measured."""
    with threads_set_to(plan.threads):
        for case in plan.cases:
            w = workload_of(case, plan.device)
            name = f"{w.name}: moments against a loop over samples"
            report(name, 0.0)
            check_moments(w, plan.arms)
            report(name, 1.0)
            for spec in plan.optimizers:
                yield measure(plan, case, w, spec, report)


def measure(plan: Plan, case: Case, w: Workload, spec: str, report: Report) -> dict[str, Any]:
    """Return the costs of one workload with one optimizer."""
    arms = (PLAIN, *plan.arms)
    name = f"{w.name}: {spec}"
    report(name, 0.0)
    steps = {arm: Training(w, spec, arm).timed() for arm in arms}
    times = timing.rounds(steps, plan.seconds, tick=lambda share: report(name, share))
    base, options = base_of(spec)
    row: dict[str, Any] = {
        "workload": w.name,
        "optimizer": spec,
        "base": specs.spell(base, options),
        "rounds": len(times[PLAIN]),
        "ratio": {
            arm: timing.ratio(timing.totals(times[arm]), timing.totals(times[PLAIN]))
            for arm in plan.arms
        },
        "milliseconds": {
            arm: 1e3 * timing.quantile(timing.totals(times[arm]), 0.5) for arm in arms
        },
        "phases": {arm: _medians(times[arm]) for arm in arms},
    }
    if plan.profile:
        report(f"{name}, operations", 0.0)
        found = {arm: operations(steps[arm], plan.device) for arm in arms}
        row["operations"] = {arm: on_host for arm, (on_host, _) in found.items()}
        if any(kernels for _, kernels in found.values()):
            row["kernels"] = {arm: kernels for arm, (_, kernels) in found.items()}
        report(f"{name}, operations", 1.0)
    del steps
    if plan.memory:
        name += ", memory"
        report(name, 0.0)
        row["bytes"] = {}
        for i, arm in enumerate(arms):
            row["bytes"][arm] = memory(case, spec, arm, plan.threads, plan.device)
            report(name, (i + 1) / len(arms))
    return row


def _medians(times: list[Parts]) -> dict[str, float]:
    """Return the median milliseconds of each phase."""
    return {
        phase: 1e3 * timing.quantile([parts[i] for parts in times], 0.5)
        for i, phase in enumerate(PHASES)
    }


@contextlib.contextmanager
def threads_set_to(n: int) -> Iterator[None]:
    """Use n threads inside of the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory(case: Case, spec: str, arm: str, threads: int, device: str = "cpu") -> Peak | None:
    """Return the peak memory of training: on the CPU that of a fresh process, elsewhere that of the
    device; None if it cannot be measured.
    """
    if device != "cpu":
        w = workload_of(case, device)
        return timing.device_peak(torch.device(device), lambda: Training(w, spec, arm).timed())
    return (
        timing.in_a_fresh_process(_peak, case, spec, arm, threads) if timing.PEAK_IS_KNOWN else None
    )


def _peak(case: Case, spec: str, arm: str, threads: int) -> Peak:
    """Return the peak memory of this process, which is a fresh one."""
    torch.set_num_threads(threads)
    w = workload_of(case, "cpu")
    few = w._replace(
        batch=lambda: part(w.batch(), slice(0, max(2, groups_of(arm) or 0) if arm != PLAIN else 2))
    )

    def rehearse() -> None:
        Training(few, spec, arm).timed()()
        scratch.forget()

    return timing.peak(rehearse, lambda: Training(w, spec, arm).timed())


def operations(
    step: Callable[[], object], device: str = "cpu", steps: int = 5
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds of a step in each of torch's operations on the CPU, without the
    operations that they call, and in each of the device's kernels. There are no kernels where
    torch's profiler does not see the device.
    """
    # Otherwise the profiler writes to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=activities(device)) as profile:
        for _ in range(steps):
            step()
        if device != "cpu":
            torch.accelerator.synchronize(torch.device(device))
    on_host: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for e in profile.key_averages():
        if e.device_type.name == "CPU":
            on_host[e.key] = e.self_cpu_time_total / 1e3 / steps
        else:
            kernels[e.key] = e.self_device_time_total / 1e3 / steps
    return on_host, kernels


def activities(device: str) -> list[torch.profiler.ProfilerActivity]:
    """Return what torch's profiler can record of a step on a device."""
    name = torch.device(device).type.upper()
    own = getattr(torch.profiler.ProfilerActivity, name, None)
    known = torch.profiler.supported_activities()
    cpu = torch.profiler.ProfilerActivity.CPU
    return [cpu] if own in (None, cpu) or own not in known else [cpu, own]
