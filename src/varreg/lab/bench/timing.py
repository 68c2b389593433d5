"""Measure speeds as ratios of steps that ran in the same round, and the peak memory of a fresh
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")
Parts = tuple[float, ...]
"""Seconds of each part of a step."""


class Ratio(NamedTuple):
    """The median of ratios, with their 10 % and 90 % quantiles."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}–{self.high:.2f})"


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile, with linear interpolation between values.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.25)
    (2.0, 1.25)
    """
    return float(np.quantile(values, q))


def ratio(these: Sequence[float], over: Sequence[float]) -> Ratio:
    """Return the ratio, computed round by round: a temporary slowdown of the machine affects both
    steps.

    >>> print(ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]))
    2.00 (2.00–2.16)
    """
    each = [a / b for a, b in zip(these, over, strict=True)]
    return Ratio(quantile(each, 0.5), quantile(each, 0.1), quantile(each, 0.9))


def timed(*parts: Callable[[], object]) -> Callable[[], Parts]:
    """Return a step that returns the seconds of each of its parts."""

    def step() -> Parts:
        marks = [time.perf_counter()]
        for part in parts:
            part()
            marks.append(time.perf_counter())
        return tuple(b - a for a, b in itertools.pairwise(marks))

    return step


def rounds(
    steps: Mapping[str, Callable[[], Parts]],
    seconds: float,
    least: int = 5,
    warm_up: int = 2,
    tick: Callable[[float], None] = lambda share: None,
) -> dict[str, list[Parts]]:
    """Run every step once in each round, for at least `seconds` and at least `least` rounds. Return
    the times.

    A new random order is drawn for every second round, and reversed in the next round. So no step
    has a better position over all rounds, for example after a pause, or after itself with its data
    still in the cache. `tick` is called between rounds with the share that is done.
    """
    order, draw = list(steps), random.Random(0)
    for step in list(steps.values()) * warm_up:
        step()
    times: dict[str, list[Parts]] = {name: [] for name in steps}
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or done < least:
        if done % 2:
            order.reverse()
        else:
            draw.shuffle(order)
        for name in order:
            times[name].append(steps[name]())
        done += 1
        tick(min(1.0, done / least, (time.perf_counter() - start) / max(seconds, 1e-9)))
    return times


def totals(times: Sequence[Parts]) -> list[float]:
    """Return the seconds of steps, all parts together."""
    return [sum(parts) for parts in times]


def in_a_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of a function in a fresh process; raise a MemoryError if the process was
    killed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            raise MemoryError(
                "varreg: a process that measured memory was killed, most likely for lack of memory."
            ) from None


PEAK_IS_KNOWN = Path("/proc/self/clear_refs").exists()
"""Whether a process can read its peak memory: only on Linux."""


class Peak(NamedTuple):
    """The peak memory of a process in bytes, minus its memory before the step."""

    training: int
    """The peak without the code of torch's operations, which is loaded before."""
    all: int
    """The peak with that code, which every process needs; it hides the memory of a small model."""


def peak(
    rehearse: Callable[[], object], make: Callable[[], Callable[[], object]], steps: int = 5
) -> Peak:
    """Return the peak memory of making and running a step in this process. `rehearse` loads torch's
    code first, with little other memory.
    """
    idle = resident()
    rehearse()
    ready = ready_for_peak()
    step = make()
    for _ in range(steps):
        step()
    highest = peak_so_far()
    return Peak(highest - ready, highest - idle)


def ready_for_peak() -> int:
    """Return freed memory to the system, reset the peak, and return the bytes that are held."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not count as needed
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    return resident()


def resident() -> int:
    """Return the bytes that this process holds."""
    return _status("VmRSS")


def peak_so_far() -> int:
    """Return the largest number of bytes that this process held since its peak was reset."""
    return _status("VmHWM")


def device_peak(
    device: torch.device, make: Callable[[], Callable[[], object]], steps: int = 5
) -> Peak | None:
    """Return the peak of a device's memory in a step; None if its module does not count memory."""
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    gc.collect()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    step = make()
    for _ in range(steps):
        step()
    highest = module.max_memory_allocated()
    return Peak(highest - before, highest)


def _status(field: str) -> int:
    """Return a field of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
