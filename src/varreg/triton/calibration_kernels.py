"""Jitted functions of a step with calibrated λ. They run after `update_kernel` has computed λ. The
same code in C is native/step.h; the definition in PyTorch is varreg/calibration.py.
"""

from __future__ import annotations

import math

import triton.language as tl

import triton
from varreg import thresholds
from varreg.triton.step_kernels import (
    HIGH,
    LAM,
    LOW,
    PRODUCTS,
    RECENT_MEAN,
    SCALE,
    SPENT,
    SQUARE,
    TIMES,
    WORDS,
    delta_of,
    find,
    move,
    number,
    values,
    write,
    write_mean,
)

TAKE_RECENT = tl.constexpr(thresholds.RECENT)
LOG_KEPT = tl.constexpr(math.log2(1 - thresholds.RECENT))


@triton.jit
def calibrate_kernel(
    table, tasks, TASKS: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr, TINY: tl.constexpr,
    INCREMENT: tl.constexpr,
):  # fmt: skip
    """Scale λ within its bounds, for elements that have a gradient, and set x to x + λ(x' − x)."""
    task, at, here, _ = find(table, tasks, TASKS, BLOCK)
    raw, low, high = (
        values(task, LAM, at, here, REAL),
        number(task, LOW, REAL),
        number(task, HIGH, REAL),
    )
    lam = raw * number(task, SCALE, REAL)
    lam = tl.where(lam < low, low, lam)
    lam = tl.where(lam > high, high, lam)
    lam = tl.where(values(task, SQUARE, at, here, REAL) > TINY, lam, raw)
    write(task, LAM, at, here, lam, REAL)
    write_mean(task, at, here, lam, TINY, REAL)
    move(task, at, here, lam, delta_of(task, at, here, INCREMENT, REAL), REAL)


@triton.jit
def mean_kernel(
    table, tasks, blocks, BLOCK: tl.constexpr, REAL: tl.constexpr, BEFORE: tl.constexpr
):
    """Add up the sums of λ of one task, in a fixed order. Before λ is scaled, compute its scale;
    afterwards, add its mean to the sum of all means.
    """
    k, lane = tl.program_id(0), tl.arange(0, BLOCK)
    task = table + k * WORDS
    first = tl.load(table + tasks * WORDS + k)
    last = tl.load(table + tasks * WORDS + k + 1, k + 1 < tasks, blocks)
    parts = tl.load(task + PRODUCTS).to(tl.pointer_type(tl.float64))
    sums, known = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for at in range(first, last, BLOCK):
        sums += tl.load(parts + (at + lane) * 2, at + lane < last, 0.0)
        known += tl.load(parts + (at + lane) * 2 + 1, at + lane < last, 0.0)
    count = tl.sum(known, 0)
    there = count > 0
    mean = tl.sum(sums, 0) / tl.where(there, count, 1.0)
    spent = tl.load(task + SPENT).to(tl.pointer_type(REAL))
    before = tl.load(spent).to(tl.float64)
    if BEFORE:
        recent = tl.load(task + RECENT_MEAN).to(tl.pointer_type(REAL))
        times = tl.load(task + TIMES).to(tl.pointer_type(REAL))
        now, t = tl.load(recent).to(tl.float64), tl.load(times).to(tl.float64)
        now = tl.where(there, now + TAKE_RECENT * (mean - now), now)
        t = tl.where(there, t + 1, t)
        tl.store(recent, now.to(REAL))
        tl.store(times, t.to(REAL))
        scale = t / (before + 1) / (now / (1 - tl.exp2(t * LOG_KEPT)))
        scale = tl.where(scale - scale == 0, scale, 1.0)  # nothing is known, or λ is 0
        tl.store(task + SCALE, scale.to(tl.int64, bitcast=True))
    else:
        tl.store(spent, tl.where(there, before + mean, before).to(REAL))
