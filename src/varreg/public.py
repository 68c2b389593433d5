"""All public names of `varreg`, imported from the modules that define them."""

import torch

try:
    from varreg import _torch as _torch
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"varreg: torch {torch.__version__} lacks a private name that varreg uses ({error}). It "
        "takes torch 2.8 and newer: install one that has it, or a newer varreg."
    ) from error
from varreg import __version__, optim
from varreg.engine import (
    Moments,
    Norms,
    Observer,
    Summary,
    Totals,
    is_observed,
    moments,
    observe,
    register_rule,
)
from varreg.errors import VarregError
from varreg.monitor import Monitor
from varreg.noise import AdaScale, FisherSums, NoiseScale, Plan, fisher, gauges
from varreg.optim import *  # noqa: F403  # as its __all__ says: one list of optimizers
from varreg.options import ALGORITHM_1
from varreg.verification import Verification, verify

__all__ = [
    "ALGORITHM_1",
    "AdaScale",
    "FisherSums",
    "Moments",
    "Monitor",
    "NoiseScale",
    "Norms",
    "Observer",
    "Plan",
    "Summary",
    "Totals",
    "VarregError",
    "Verification",
    "__version__",
    "fisher",
    "gauges",
    "is_observed",
    "moments",
    "observe",
    "register_rule",
    "verify",
]
__all__ += optim.__all__
