"""Work in one pass over memory, by a few lines of C, each with a twin in PyTorch.

They come with the wheel, or are compiled at first use, if a C compiler is at hand, and kept in the
user's cache. Without them, PyTorch's own operations do the same: slower, with the same numbers.
`VARREG_NATIVE=0` asks for that. `VARREG_NATIVE_FLAGS` has flags for the compiler beside its own.
"""

from varreg.native import contract, layer_sums, reductions
from varreg.native.layer_sums import KNOWS_SINGLE_ROWS, conv, lookup, outer, sums, total
from varreg.native.library import status
from varreg.native.reductions import (
    norm_channels,
    norm_rows,
    pixels,
    rows,
)
from varreg.native.spread import lengths, single
from varreg.native.step import compare, l1, lambdas, repeat, serves, update, variance, whole

__all__ = [
    "KNOWS_SINGLE_ROWS",
    "compare",
    "contract",
    "conv",
    "l1",
    "lambdas",
    "layer_sums",
    "lengths",
    "lookup",
    "norm_channels",
    "norm_rows",
    "outer",
    "pixels",
    "reductions",
    "repeat",
    "rows",
    "serves",
    "single",
    "status",
    "sums",
    "total",
    "update",
    "variance",
    "whole",
]
