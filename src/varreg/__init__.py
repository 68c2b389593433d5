"""Gradient variance for PyTorch: measure how much the samples of a mini-batch disagree, and let it set the step."""

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
    "__version__",
    "moments",
    "observe",
    "register_rule",
]
