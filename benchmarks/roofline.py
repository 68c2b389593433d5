"""Compute a roofline: the least possible cost of the kernels in Triton, over plain training.

    python -m benchmarks.roofline            # print the tables of docs/understand/kernels.md
    python -m benchmarks.roofline --write    # and put them there

Nothing is measured. A kernel takes as long as its operations at the device's published peak, or its
bytes at the published bandwidth, whichever is longer: each operand is read once from memory, and
each result written once. Real kernels take longer, ours and PyTorch's.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from varreg.thresholds import TRITON_TILES


class Device(NamedTuple):
    """Published peaks: bytes and float32 operations per second, of vector units."""

    name: str
    bandwidth: float
    operations: float


DEVICES = (
    Device("A100 80 GB (SXM)", 2.039e12, 19.5e12),
    Device("H100 (SXM)", 3.35e12, 67e12),
    Device("MI300X", 5.3e12, 163.4e12),
)


class Work(NamedTuple):
    """One kernel: operations, and numbers of four bytes that it reads or writes."""

    operations: float
    numbers: float

    def seconds(self, device: Device) -> float:
        """Return how long it takes at best."""
        return max(self.operations / device.operations, 4 * self.numbers / device.bandwidth)


class Row(NamedTuple):
    """What plain training does for a layer or a step, and what varreg does in its place."""

    name: str
    plain: list[Work]
    ours: list[Work]


def product(rows: float, o: float, i: float) -> Work:
    """Return a matrix product: forward, with respect to the input, or to the weight."""
    return Work(2 * rows * o * i, rows * (o + i) + o * i)


def layer_sums(samples: int, rows: int, o: int, i: int, inputs: float) -> Work:
    """Return S and W of a weight `[o, i]`, of which S is written twice: rows are padded to whole
    tiles, and each sample's product is added to S, squared, and added to W.
    """
    tile = TRITON_TILES["ieee"].rows
    padded = -(-rows // tile) * tile
    return Work(samples * o * i * (2 * padded + 3), samples * rows * o + inputs + 3 * o * i)


def dense(name: str, samples: int, rows: int, o: int, i: int) -> Row:
    """Return a dense layer."""
    one = product(samples * rows, o, i)
    sums = layer_sums(samples, rows, o, i, samples * i * rows)
    if rows == 1:  # (δ ⊗ a)² = δ² ⊗ a²: two products
        sums = Work(4 * samples * o * i, samples * (o + i) + 3 * o * i)
    return Row(name, [one, one, one], [one, one, sums])


def conv(name: str, samples: int, c: int, o: int, kernel: int, side: int) -> Row:
    """Return a square convolution with stride 1 and padding."""
    i, pixels = c * kernel**2, side**2
    numbers = samples * pixels * (c + o) + o * i
    one = Work(2 * samples * pixels * o * i, numbers)
    return Row(name, [one] * 3, [one, one, layer_sums(samples, pixels, o, i, samples * pixels * c)])


def norm(name: str, samples: int, rows: int, n: int) -> Row:
    """Return a layer norm: forward, with respect to the input, and to weight and bias, for which we
    read input and gradient once; then S and W of `[samples, n]`.
    """
    values = samples * rows * n
    plain = [
        Work(8 * values, 2 * values),
        Work(12 * values, 3 * values),
        Work(4 * values, 2 * values),
    ]
    ours = [*plain[:2], Work(10 * values, 2 * values + 2 * samples * n)]
    ours += [Work(3 * samples * n, samples * n + 3 * n)] * 2
    return Row(name, plain, ours)


def embedding(name: str, samples: int, rows: int, vocabulary: int, n: int) -> Row:
    """Return a lookup: its forward, and its gradient. We add up each sample's rows first."""
    values, table = samples * rows * n, vocabulary * n
    plain = [Work(0, 2 * values), Work(values, values + table)]
    return Row(
        name, plain, [plain[0], Work(values, 2 * values), Work(3 * values, values + 6 * table)]
    )


def step(name: str, n: int, plain: int, ours: int) -> Row:
    """Return the step of n parameters: plain numbers, and those of comparison and update."""
    base = Work(0, plain * n)
    return Row(name, [base], [base, Work(0, 3 * n), Work(0, ours * n)])


ROWS = (
    dense("dense 768 → 3072, 16 × 128 rows", 16, 128, 3072, 768),
    dense("dense 768 → 3072, 16 × 1024 rows", 16, 1024, 3072, 768),
    dense("dense 192 → 768, 16 × 128 rows", 16, 128, 768, 192),
    dense("dense 800 → 500, batch 100, 1 row", 100, 1, 500, 800),
    conv("convolution 3×3, 64 → 64, 32 × 32 pixels, batch 32", 32, 64, 64, 3, 32),
    conv("convolution 3×3, 256 → 256, 8 × 8 pixels, batch 32", 32, 256, 256, 3, 8),
    norm("layer norm 768, 16 × 128 rows", 16, 128, 768),
    embedding("embedding 50,000 × 768, 16 × 128 tokens", 16, 128, 50_000, 768),
    # foreach: momentum 8 numbers for each parameter, Adam 16; ours reads S, W, sums and history
    step("step, SGD with momentum", 100_000_000, 8, 12),
    step("step, Adam", 100_000_000, 16, 17),
)


def tables() -> str:
    """Return the tables, in Markdown."""
    lines = ["| device | bytes per second | float32 operations per second |", "| --- | --- | --- |"]
    lines += [
        f"| {d.name} | {d.bandwidth / 1e12:g} T | {d.operations / 1e12:g} T |" for d in DEVICES
    ]
    names = " | ".join(d.name for d in DEVICES)
    lines += ["", f"| computed, over plain training | operations | bytes | {names} |"]
    lines.append("| --- " * (3 + len(DEVICES)) + "|")
    for row in ROWS:
        sums = [
            [sum(getattr(work, key) for work in works) for works in (row.ours, row.plain)]
            for key in Work._fields
        ]
        times = [
            [sum(work.seconds(d) for work in works) for works in (row.ours, row.plain)]
            for d in DEVICES
        ]
        cells = [f"{a / b:.2f}" if b else "–" for a, b in (*sums, *times)]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser("python -m benchmarks.roofline", description=__doc__).parse_args()
    print(tables())


if __name__ == "__main__":
    main()
