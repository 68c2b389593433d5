"""Kernels in Triton for GPUs: the same functions as `varreg.native` has in C.

As there, each kernel has a definition: a slower function in PyTorch that computes the same numbers
up to rounding. Triton compiles kernels at first use, for the given shapes and device. With
`TRITON_INTERPRET=1` in the environment they run on the CPU, slowly, for tests.
"""

from varreg.triton.convolutions import conv
from varreg.triton.dense import KNOWS_SINGLE_ROWS, outer
from varreg.triton.launch import status
from varreg.triton.lookups import lookup
from varreg.triton.norms import norm_channels, norm_rows
from varreg.triton.plain_sums import pixels, rows, sums, total
from varreg.triton.step import compare, lambdas, serves, update, variance

__all__ = [
    "KNOWS_SINGLE_ROWS",
    "compare",
    "conv",
    "lambdas",
    "lookup",
    "norm_channels",
    "norm_rows",
    "outer",
    "pixels",
    "rows",
    "serves",
    "status",
    "sums",
    "total",
    "update",
    "variance",
]
