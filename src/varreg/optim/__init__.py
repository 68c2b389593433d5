"""λ → step: torch's optimizers, regularized."""

from varreg.optim.adam import VRAdam, VRAdamW, VRNAdam
from varreg.optim.adaptive import VRAdadelta, VRAdagrad, VRRMSprop
from varreg.optim.schedule import CosineS, InverseTimeS, LambdaS
from varreg.optim.sgd import VRSGD
from varreg.optim.wrapper import VarianceRegularized

__all__ = [
    "VRSGD",
    "CosineS",
    "InverseTimeS",
    "LambdaS",
    "VRAdadelta",
    "VRAdagrad",
    "VRAdam",
    "VRAdamW",
    "VRNAdam",
    "VRRMSprop",
    "VarianceRegularized",
]
