"""Kernels in C for the CPU. A kernel needs one pass over memory.

Each kernel has a definition: a slower function in PyTorch that computes the same numbers up to
rounding. The file of the kernel names its definition.

The wheel contains the compiled kernels. Otherwise they are compiled at first use, if a C compiler
is installed, and kept in the user's cache. Without kernels, the definitions are used.
`VARREG_NATIVE=0` switches the kernels off. `VARREG_NATIVE_FLAGS` has more flags for the compiler.
"""

from varreg.native import contract, layer_sums, reductions
from varreg.native.layer_sums import (
    KNOWS_SINGLE_ROWS,
    WITH_NORMS,
    conv,
    lookup,
    outer,
    single_rows,
    sums,
    total,
)
from varreg.native.library import status
from varreg.native.many_layers import LayerSizes, ManyLayers
from varreg.native.noise_sums import noise_sums
from varreg.native.reductions import (
    norm_channels,
    norm_rows,
    pixels,
    rows,
)
from varreg.native.spread import lengths, single
from varreg.native.step import compare, lambdas, repeat, serves, update, variance, whole

__all__ = [
    "KNOWS_SINGLE_ROWS",
    "WITH_NORMS",
    "LayerSizes",
    "ManyLayers",
    "compare",
    "contract",
    "conv",
    "lambdas",
    "layer_sums",
    "lengths",
    "lookup",
    "noise_sums",
    "norm_channels",
    "norm_rows",
    "outer",
    "pixels",
    "reductions",
    "repeat",
    "rows",
    "serves",
    "single",
    "single_rows",
    "status",
    "sums",
    "total",
    "update",
    "variance",
    "whole",
]
