"""Jitted functions of the step. A program computes a block of one parameter. It reads its task from
a table of `Task` (native/contract.py), the same struct as in C: pointers and numbers of eight
bytes. The same code in C is native/step.h; the definitions in PyTorch are varreg/regularizer.py and
varreg/optim/step.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import triton.language as tl

import triton
from varreg import thresholds
from varreg.native.contract import Form, History, Increment, Task


def _field(name: str) -> Any:
    return tl.constexpr(getattr(Task, name).offset // 8)


N, X, LAM, STEPS = _field("n"), _field("x"), _field("lam"), _field("steps")
TOTAL, SQUARE, GRAD, PRODUCTS = map(_field, ("total", "square", "grad", "products"))
VARIANCE, DELTA = _field("variance"), _field("delta")
RHO_SUM, RHO_COUNT = _field("rho_sum"), _field("rho_count")
AVERAGE, SQUARES = _field("average"), _field("squares")
SUM_N, SUM_C, SUM_V = _field("N"), _field("C"), _field("V")
KEEP_N, KEEP_C, KEEP_V = map(_field, ("keep_N", "keep_C", "keep_V"))
TAKE_N, TAKE_C, TAKE_V = map(_field, ("take_N", "take_C", "take_V"))
M, FACTOR, ROUNDING = map(_field, ("m", "factor", "rounding"))
S, HALF, LIMIT, LOW, HIGH = map(_field, ("s", "half", "limit", "low", "high"))
LR, SIGN, DECAY, MU, AGAIN = map(_field, ("lr", "sign", "decay", "mu", "again"))
UNBIAS_N, UNBIAS_P, EPS, KNOWN = map(_field, ("unbias_n", "unbias_p", "eps", "known"))
RECENT_MEAN, SPENT, TIMES, SCALE = map(_field, ("recent", "spent", "times", "scale"))
WORDS = tl.constexpr(ctypes.sizeof(Task) // 8)
HUGE_SUM = tl.constexpr(thresholds.LARGEST_HISTORY)
HISTORY_SUM, HISTORY_MEAN = tl.constexpr(History.SUM.value), tl.constexpr(History.MEAN.value)
HISTORY_HARMONIC = tl.constexpr(History.HARMONIC.value)
RATIONAL = tl.constexpr(Form.RATIONAL.value)
GRADIENT, ADAM = tl.constexpr(Increment.GRADIENT.value), tl.constexpr(Increment.ADAM.value)
HEAVY_BALL = tl.constexpr(Increment.HEAVY_BALL.value)


@triton.jit
def find(table, tasks, TASKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's task, the positions of its block, a mask of the positions that exist,
    and whether this is the task's first block. After the tasks, the table has the number of the
    first block of each task.
    """
    block, lane = tl.program_id(0), tl.arange(0, TASKS)
    firsts = tl.load(table + tasks * WORDS + lane, lane < tasks, 0)
    k = tl.sum(((firsts <= block) & (lane < tasks)).to(tl.int32), 0) - 1
    first = tl.load(table + tasks * WORDS + k)
    task = table + k * WORDS
    at = (block - first) * BLOCK + tl.arange(0, BLOCK)
    return task, at, at < tl.load(task + N), block == first


@triton.jit
def number(task, FIELD: tl.constexpr, REAL: tl.constexpr):
    return tl.load(task + FIELD).to(tl.float64, bitcast=True).to(REAL)


@triton.jit
def values(task, FIELD: tl.constexpr, at, here, REAL: tl.constexpr):
    return tl.load(tl.load(task + FIELD).to(tl.pointer_type(REAL)) + at, here, 0.0)


@triton.jit
def write(task, FIELD: tl.constexpr, at, here, new, REAL: tl.constexpr):
    tl.store(tl.load(task + FIELD).to(tl.pointer_type(REAL)) + at, new, here)


@triton.jit
def variance_of(task, at, here, REAL: tl.constexpr):
    """Return (m·W − S²)·factor, and 0 where that is no more than rounding errors."""
    total, square = values(task, TOTAL, at, here, REAL), values(task, SQUARE, at, here, REAL)
    size = number(task, M, REAL) * square
    left = size - total * total
    kept = left * number(task, FACTOR, REAL)
    return tl.where(left <= size * number(task, ROUNDING, REAL), 0.0, kept)  # nan stays nan


@triton.jit
def regularize(
    task, at, here, variance, delta,
    HISTORY: tl.constexpr, FORM: tl.constexpr, SCALE_FREE: tl.constexpr, MASKED: tl.constexpr,
    TINY: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Record ρ in its history, write λ, and return λ."""
    rho = variance
    if SCALE_FREE:
        rho = variance / (delta * delta)
    limit = number(task, LIMIT, REAL)
    rho = tl.where(rho > limit, limit, rho)
    if MASKED:  # no sample had a gradient, or squares lost their precision
        rho = tl.where(values(task, SQUARE, at, here, REAL) <= TINY, float("nan"), rho)
    entered = rho
    if HISTORY == HISTORY_HARMONIC:
        entered = 1 / rho
    valid = (rho - rho == 0) & (entered - entered == 0)  # both are finite
    total = values(task, RHO_SUM, at, here, REAL) + tl.where(valid, entered, 0.0)
    total = tl.where(total > HUGE_SUM, HUGE_SUM, total).to(REAL)
    count = values(task, RHO_COUNT, at, here, REAL) + tl.where(valid, 1.0, 0.0)
    write(task, RHO_SUM, at, here, total, REAL)
    write(task, RHO_COUNT, at, here, count, REAL)
    if HISTORY == HISTORY_SUM:
        average, relative = total, rho / total
    elif HISTORY == HISTORY_MEAN:
        average, relative = total / count, rho / total * count  # exactly 1 in the first step
    else:
        average, relative = count / total, rho / (count / total)
    if FORM == RATIONAL:
        s = number(task, S, REAL)
        lam = (1 + s) / (1 + s * relative)
    else:
        half = number(task, HALF, REAL)
        lam = (1 + half) * (average / rho) - half
    low, high = number(task, LOW, REAL), number(task, HIGH, REAL)
    lam = tl.where(lam < low, low, lam)
    lam = tl.where(lam > high, high, lam)
    lam = tl.where(lam == lam, lam, 1.0)  # undefined: take the base's own step
    write(task, LAM, at, here, lam, REAL)
    return lam


@triton.jit
def accumulated(
    task, SUM: tl.constexpr, KEEP: tl.constexpr, TAKE: tl.constexpr, s2, at, here,
    REAL: tl.constexpr,
):  # fmt: skip
    """Write V ← keep·V + take·σ², and return it."""
    V = number(task, KEEP, REAL) * values(task, SUM, at, here, REAL) + number(task, TAKE, REAL) * s2
    write(task, SUM, at, here, V, REAL)
    return V


@triton.jit
def adam(task, s2, at, here, REAL: tl.constexpr):
    """Return Adam's increment n/D and its variance."""
    N_ = accumulated(task, SUM_N, KEEP_N, TAKE_N, s2, at, here, REAL)
    C = accumulated(task, SUM_C, KEEP_C, TAKE_C, s2, at, here, REAL)
    V = accumulated(task, SUM_V, KEEP_V, TAKE_V, s2, at, here, REAL)
    by_n, by_p = number(task, UNBIAS_N, REAL), number(task, UNBIAS_P, REAL)
    root = tl.sqrt(values(task, SQUARES, at, here, REAL) * by_p)
    inverse = 1 / (root + number(task, EPS, REAL))
    delta = values(task, AVERAGE, at, here, REAL) * by_n * inverse
    slope = tl.abs(delta)
    size = by_n * by_n * N_ + slope * slope * (by_p * by_p * V)
    left = size - 2 * slope * (by_n * by_p * C)
    left = tl.where(left <= size * number(task, KNOWN, REAL), float("nan"), left)
    return delta, left * inverse * inverse


@triton.jit
def delta_of(task, at, here, INCREMENT: tl.constexpr, REAL: tl.constexpr):
    """Return δ̄, after the base's step: see native/step.h."""
    if INCREMENT == ADAM:
        root = tl.sqrt(values(task, SQUARES, at, here, REAL) * number(task, UNBIAS_P, REAL))
        inverse = 1 / (root + number(task, EPS, REAL))
        delta = values(task, AVERAGE, at, here, REAL) * number(task, UNBIAS_N, REAL) * inverse
    elif INCREMENT == HEAVY_BALL:
        delta = values(task, AVERAGE, at, here, REAL)
    else:  # x' = x − lr·delta, and delta contains decay·x: solve for delta
        decay = number(task, DECAY, REAL)
        delta = number(task, SIGN, REAL) * values(task, GRAD, at, here, REAL)
        delta += decay * values(task, X, at, here, REAL)
        if INCREMENT != GRADIENT:  # Nesterov's
            delta += number(task, MU, REAL) * values(task, AVERAGE, at, here, REAL)
        delta *= 1 / (1 - number(task, LR, REAL) * decay)  # one division for all elements
    return delta


@triton.jit
def increment_of(task, s2, at, here, INCREMENT: tl.constexpr, REAL: tl.constexpr):
    """Return δ̄ and its variance, after the base's step."""
    if INCREMENT == ADAM:
        delta, variance = adam(task, s2, at, here, REAL)
    else:
        delta, variance = delta_of(task, at, here, INCREMENT, REAL), s2
        if INCREMENT != GRADIENT:
            variance = accumulated(task, SUM_V, KEEP_V, TAKE_V, s2, at, here, REAL)
            if INCREMENT != HEAVY_BALL:  # Nesterov's
                mu = number(task, MU, REAL)
                variance = mu * mu * variance + number(task, AGAIN, REAL) * s2
    return delta, variance


@triton.jit
def move(task, at, here, lam, delta, REAL: tl.constexpr):
    """Go to x + λ(x' − x) = x' + (1 − λ)·lr·δ̄."""
    x = values(task, X, at, here, REAL) + (1 - lam) * (number(task, LR, REAL) * delta)
    write(task, X, at, here, x, REAL)


@triton.jit
def write_mean(task, at, here, lam, TINY: tl.constexpr, REAL: tl.constexpr):
    """Write the sum of λ over the elements of a block that have a gradient, and their number."""
    known = here & (values(task, SQUARE, at, here, REAL) > TINY)
    out = tl.load(task + PRODUCTS).to(tl.pointer_type(tl.float64)) + tl.program_id(0) * 2
    tl.store(out, tl.sum(tl.where(known, lam, 0.0).to(tl.float64), 0))
    tl.store(out + 1, tl.sum(known.to(tl.float64), 0))


@triton.jit
def update_kernel(
    table, tasks, TASKS: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr, TINY: tl.constexpr,
    INCREMENT: tl.constexpr, HISTORY: tl.constexpr, FORM: tl.constexpr, SCALE_FREE: tl.constexpr,
    CALIBRATED: tl.constexpr,
):  # fmt: skip
    """Compute λ, go to x + λ(x' − x), and count the step. If λ is calibrated, x must wait for the
    mean of λ over the whole parameter.
    """
    task, at, here, is_first = find(table, tasks, TASKS, BLOCK)
    s2 = variance_of(task, at, here, REAL)
    delta, variance = increment_of(task, s2, at, here, INCREMENT, REAL)
    lam = regularize(task, at, here, variance, delta, HISTORY, FORM, SCALE_FREE, True, TINY, REAL)
    if CALIBRATED:
        write_mean(task, at, here, lam, TINY, REAL)
    else:
        move(task, at, here, lam, delta, REAL)
    if is_first:
        address = tl.load(task + STEPS)
        if address != 0:  # otherwise the count is on the CPU
            steps = address.to(tl.pointer_type(REAL))
            tl.store(steps, tl.load(steps) + 1)


@triton.jit
def lambda_kernel(
    table, tasks, TASKS: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr, TINY: tl.constexpr,
    HISTORY: tl.constexpr, FORM: tl.constexpr, SCALE_FREE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute λ of an increment whose variance is known."""
    task, at, here, _ = find(table, tasks, TASKS, BLOCK)
    variance, delta = values(task, VARIANCE, at, here, REAL), values(task, DELTA, at, here, REAL)
    regularize(task, at, here, variance, delta, HISTORY, FORM, SCALE_FREE, MASKED, TINY, REAL)


@triton.jit
def variance_kernel(
    table, tasks, TASKS: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr, TINY: tl.constexpr
):
    """Write v² of moments."""
    task, at, here, _ = find(table, tasks, TASKS, BLOCK)
    write(task, VARIANCE, at, here, variance_of(task, at, here, REAL), REAL)


@triton.jit
def compare_kernel(
    table, tasks, TASKS: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr, TINY: tl.constexpr
):
    """Write S·S, g·S, g·g and ΣW of each block, in double precision."""
    task, at, here, _ = find(table, tasks, TASKS, BLOCK)
    S_, g = (
        values(task, TOTAL, at, here, REAL).to(tl.float64),
        values(task, GRAD, at, here, REAL).to(tl.float64),
    )
    out = tl.load(task + PRODUCTS).to(tl.pointer_type(tl.float64)) + tl.program_id(0) * 4
    tl.store(out, tl.sum(S_ * S_, 0))
    tl.store(out + 1, tl.sum(g * S_, 0))
    tl.store(out + 2, tl.sum(g * g, 0))
    tl.store(out + 3, tl.sum(values(task, SQUARE, at, here, REAL).to(tl.float64), 0))


@triton.jit
def add_up_kernel(table, tasks, parts, out, blocks, BLOCK: tl.constexpr):
    """Add up the four sums of the blocks of each task, one program each, in a fixed order."""
    k, lane = tl.program_id(0), tl.arange(0, BLOCK)
    first = tl.load(table + tasks * WORDS + k)
    last = tl.load(table + tasks * WORDS + k + 1, k + 1 < tasks, blocks)
    for j in tl.static_range(4):
        sums = tl.zeros((BLOCK,), tl.float64)
        for at in range(first, last, BLOCK):
            sums += tl.load(parts + (at + lane) * 4 + j, at + lane < last, 0.0)
        tl.store(out + k * 4 + j, tl.sum(sums, 0))
