"""Work in one pass over memory, by a few lines of C, each with a twin in PyTorch.

They are compiled at first use, if a C compiler is at hand, and kept in the user's cache. Without one, the same is done by PyTorch's own
operations: slower, with the same numbers. `VARREG_NATIVE=0` asks for that. `VARREG_NATIVE_FLAGS` has flags for the compiler beside its own.
"""

from varreg.native import reduce, sums
from varreg.native.library import status
from varreg.native.step import Update, compare, kinds, knows, lambdas, numbers, serves, update, variance

__all__ = [
    "Update",
    "compare",
    "kinds",
    "knows",
    "lambdas",
    "numbers",
    "reduce",
    "serves",
    "status",
    "sums",
    "update",
    "variance",
]
