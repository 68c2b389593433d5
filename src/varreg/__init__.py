"""Gradient variance for PyTorch: measure how much the samples of a mini-batch disagree, and let it set the step."""

import importlib

from varreg.engine import Moments, Observer, Summary, moments, observe, register_rule
from varreg.optim import (
    VRSGD,
    CosineS,
    InverseTimeS,
    LambdaS,
    VarianceRegularized,
    VRAdadelta,
    VRAdagrad,
    VRAdam,
    VRAdamW,
    VRNAdam,
    VRRMSprop,
)
from varreg.verify import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "VRSGD",
    "CosineS",
    "InverseTimeS",
    "LambdaS",
    "Moments",
    "Observer",
    "Summary",
    "VRAdadelta",
    "VRAdagrad",
    "VRAdam",
    "VRAdamW",
    "VRNAdam",
    "VRRMSprop",
    "VarianceRegularized",
    "Verification",
    "__version__",
    "moments",
    "observe",
    "register_rule",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "distributed":  # imported when it is asked for: it needs torch's own, which takes a while
        return importlib.import_module("varreg.distributed")
    raise AttributeError(f"module 'varreg' has no attribute '{name}'")
