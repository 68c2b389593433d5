"""Compile every Triton kernel for several GPUs, and count registers that spill. No GPU is needed.

    python -m tools.kernels            # print the table
    python -m tools.kernels --check    # and fail if a kernel spills with its default tile

Spilled registers go to memory and back: a kernel that spills is slow, without any warning. NVIDIA's
counts are from Triton's own `cuobjdump -res-usage`, AMD's from the kernel's metadata. Launches
compile a kernel anew for pointers and sizes that 16 divides, and PyTorch's memory is such; so each
kernel is compiled with sizes that 16 divides and with others, and the larger count is printed. Both
compilers come with Triton, so one version of Triton gives the same counts on every machine. Another
version may give other counts: spills of up to `FEW` bytes are printed, but do not fail the check.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import triton
from varreg import thresholds
from varreg.lab.environment import cores
from varreg.triton import (
    calibration_kernels,
    convolutions,
    dense,
    lookups,
    norms,
    plain_sums,
    step_kernels,
)
from varreg.triton.launch import EXPLICIT

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FEW = 16
"""Bytes of a thread that NVIDIA's compiler moves to the stack though most registers are free (8,
with 48 of 255 in use, in kernels of a few lines), to let more threads run at once. Which kernels
have them changes from version to version. A kernel that runs out of registers spills hundreds."""
_POINTERS = {"keys": "*i64", "order": "*i64", "ids": "*i64", "table": "*i64"}
_REALS = {"x", "delta", "a", "dy", "values", "out", "c", "mean", "rstd", "parts"}


class Case(NamedTuple):
    """A kernel with the constants that it is compiled with."""

    name: str
    kernel: Any
    meta: dict[str, Any]
    real: str = "fp32"
    """The type of what it reads; what it writes is float32, or float64."""
    warps: int = 4
    stages: int = 3


class Usage(NamedTuple):
    """The registers and memory that a compiled kernel uses."""

    registers: int
    """Vector registers of a thread; AMD's include those for accumulation, which share the file."""
    spilled: int
    """Bytes of a thread in memory: NVIDIA's stack and local memory, AMD's scratch memory."""


def cases() -> Iterator[Case]:
    """Yield every kernel as it is launched by default, and with its other kinds of numbers."""
    for precision, real in (("ieee", "fp32"), ("tf32", "fp32"), ("ieee", "fp16"), ("ieee", "bf16")):
        tile = thresholds.TRITON_TILES[precision]
        stages = thresholds.TRITON_STAGES
        sizes = {"BLOCK_O": tile.o, "BLOCK_I": tile.i, "BLOCK_R": tile.rows}
        meta = {**sizes, "BIAS": True, "TWICE": True, "PRECISION": precision}
        kind = precision if real == "fp32" else real
        chain = {**meta, "CHAIN": thresholds.TRITON_CHAIN}
        yield Case(f"dense {kind}", dense.outer_kernel, chain, real, tile.warps, stages[0])
        yield Case(
            f"dense, one row, {kind}", dense.single_rows_kernel, meta, real, tile.warps, stages[0]
        )
        window = {"KERNEL": 9, "KERNEL_W": 3, "DOT": True}
        yield Case(
            f"conv {kind}",
            convolutions.conv_kernel,
            {**chain, **window},
            real,
            tile.warps,
            stages[1],
        )
    deep = {**chain, **window, "DOT": False, "BLOCK_O": 1, "BLOCK_I": 16}
    yield Case("conv, depthwise", convolutions.conv_kernel, deep, "fp32", tile.warps, stages[1])
    yield Case("splits", dense.add_splits_kernel, {"BLOCK": thresholds.TRITON_BLOCK})
    u, n = thresholds.TRITON_SUMS
    yield Case("sums", plain_sums.sums_kernel, {"BLOCK_U": u, "BLOCK_N": n})
    longest = thresholds.TRITON_LONGEST_ROW
    for row in (1024, longest):
        meta = {"EPS": 1e-5, "CENTRE": True, "BLOCK": row}
        yield Case(f"norm, row of {row}", norms.norm_rows_kernel, meta, warps=norms.warps(row))
    for given in (False, True):
        meta = {"EPS": 1e-5, "GIVEN": given, "BLOCK": thresholds.TRITON_BLOCK}
        yield Case(f"norm, channels{', given' * given}", norms.norm_channels_kernel, meta)
    yield Case("lookup, keys", lookups.keys_kernel, {"BLOCK": thresholds.TRITON_BLOCK})
    yield Case("lookup, groups", lookups.groups_kernel, {"BLOCK": n})
    yield Case("lookup, rows", lookups.rows_kernel, {"BLOCK": n, "BLOCK_L": u})
    table = {"TASKS": 64, "BLOCK": thresholds.TRITON_BLOCK, "REAL": tl.float32, "TINY": 1e-38}
    regularizer = {"HISTORY": 1, "FORM": 0, "SCALE_FREE": True}
    for increment, name in enumerate(("SGD", "heavy ball", "Nesterov", "Adam")):
        meta = {**table, "INCREMENT": increment}
        for calibrated in (False, True):
            whole = {**meta, **regularizer, "CALIBRATED": calibrated}
            word = ", calibrated" * calibrated
            yield Case(f"step, {name}{word}", step_kernels.update_kernel, whole)
        yield Case(f"calibration, {name}", calibration_kernels.calibrate_kernel, meta)
    for before in (False, True):
        meta = {"BLOCK": 128, "REAL": tl.float32, "BEFORE": before}
        yield Case(f"mean of λ{', before' * before}", calibration_kernels.mean_kernel, meta)
    yield Case("lambda", step_kernels.lambda_kernel, {**table, **regularizer, "MASKED": True})
    yield Case("variance", step_kernels.variance_kernel, table)
    yield Case("compare", step_kernels.compare_kernel, table)
    yield Case("compare, ends", step_kernels.add_up_kernel, {"BLOCK": 128}, "fp64")


SIZES = "divisible", "odd", "ones"
"""What Triton may know of sizes: that 16 divides all, or none, or that all are 1."""


def compile_for(case: Case, target: GPUTarget, sizes: str = "divisible") -> Any:
    """Return a kernel compiled for a target, as a launch compiles it: 16 divides all addresses, and
    `sizes` says what is known of sizes. Triton treats those that are 1 as constants.
    """
    written = "fp64" if case.real == "fp64" else "fp32"
    read = {"x", "delta", "a", "dy", "values"}
    signature = {}
    for name in case.kernel.arg_names:
        if name in case.meta:
            signature[name] = "constexpr"
        elif name in _POINTERS:
            signature[name] = _POINTERS[name]
        elif name in _REALS and not (name == "c" and case.kernel is norms.norm_channels_kernel):
            signature[name] = f"*{case.real if name in read else written}"
        else:
            signature[name] = "i32"
    # convolutions have a number named dy: it is their dilation
    if case.kernel is convolutions.conv_kernel:
        signature["dy"] = "i32"
    constants = dict(case.meta)
    if sizes == "ones":
        constants |= {name: 1 for name, kind in signature.items() if kind == "i32"}
        signature = {n: "constexpr" if n in constants else kind for n, kind in signature.items()}
    known = ("*", "i32") if sizes == "divisible" else ("*",)
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(case.kernel.arg_names)
        if signature[name].startswith(known)
    }
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages, **EXPLICIT}
    return triton.compile(source, target=target, options=options)


def usage(compiled: Any) -> Usage:
    """Return the registers of a compiled kernel."""
    if "cubin" not in compiled.asm:
        assembly = compiled.asm["amdgcn"]
        # a spilled vector register may have gone to one for accumulation: only scratch is memory
        keys = "vgpr_count", "private_segment_fixed_size"
        found = [re.search(rf"^\s+\.{key}:\s+(\d+)", assembly, re.MULTILINE) for key in keys]
        assert all(found), "AMD's metadata has no counts of registers"
        return Usage(*(int(match[1]) for match in found if match))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        re.search(rf"\b{key}:(\d+)", text) for key in ("REG", "STACK", "LOCAL")
    )
    if not (registers and stack and local):
        raise ValueError(f"cuobjdump says nothing of registers: {text}")
    return Usage(int(registers[1]), int(stack[1]) + int(local[1]))


def compiled_row(case: Case) -> list[Usage]:
    """Return the largest usage of a kernel on each target. Compile it also for sizes of 1."""
    row = []
    for target in TARGETS.values():
        both = [usage(compile_for(case, target, sizes)) for sizes in ("divisible", "odd")]
        row.append(Usage(*map(max, *both)))
    compile_for(case, TARGETS["sm_90"], "ones")
    return row


def _row_by_name(name: str) -> list[Usage]:
    """Return the row of the case with this name. Cases hold kernels, which cannot be sent to
    another process.
    """
    return compiled_row(next(case for case in cases() if case.name == name))


def main() -> int:
    """Print the table; with `--check`, return 1 where a kernel spills."""
    parser = argparse.ArgumentParser("python -m tools.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a kernel spills")
    parser.add_argument("--only", default="", help="kernels whose name matches this")
    parser.add_argument("--processes", type=int, default=cores(), help="that compile at once")
    options = parser.parse_args()
    names = [case.name for case in cases() if re.search(options.only, case.name)]
    print(f"Triton {triton.__version__}: registers of each thread, and what spills of them\n")
    print(f"{'':30}{''.join(f'{target:11}' for target in TARGETS)}")
    spilling = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name, row in zip(names, pool.imap(_row_by_name, names), strict=True):
            cells = [f"{u.registers:5}{f' +{u.spilled}' if u.spilled else '':6}" for u in row]
            print(f"{name:30}{''.join(cells)}", flush=True)
            spilling += [name] if any(use.spilled > FEW for use in row) else []
    print(
        f"\n{len(names)} kernels, {len(spilling)} spill{': ' * bool(spilling)}{'; '.join(spilling)}"
    )
    return int(options.check and bool(spilling))


if __name__ == "__main__":
    sys.exit(main())
