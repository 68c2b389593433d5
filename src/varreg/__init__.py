"""Gradient variance for PyTorch: measure how much the samples of a mini-batch disagree, and let it
set the step.

Public names are imported when the first of them is used: importing torch takes seconds, and `varreg
--help` does not need it.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from varreg.errors import VarregError as VarregError

if TYPE_CHECKING:
    from varreg.optim import *  # noqa: F403
    from varreg.public import *  # noqa: F403
    from varreg.public import __all__ as __all__

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    if importlib.util.find_spec(f"varreg.{name}") is not None:
        return importlib.import_module(f"varreg.{name}")
    if not name.startswith("__") or name == "__all__":
        public = importlib.import_module("varreg.public")
        names: dict[str, object] = {each: getattr(public, each) for each in public.__all__}
        globals().update(names, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'varreg' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]
