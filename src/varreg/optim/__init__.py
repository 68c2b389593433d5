"""λ → step: torch's optimizers, regularized.

`varreg` exports the names in `__all__`; the lab, the theory and the benchmarks use all optimizers
in `REGULARIZED`.
"""

from varreg.optim.adadelta import VRAdadelta
from varreg.optim.adagrad import VRAdagrad
from varreg.optim.adam import VRAdam, VRAdamW
from varreg.optim.base import Regularized
from varreg.optim.nadam import VRNAdam
from varreg.optim.rmsprop import VRRMSprop
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

REGULARIZED: dict[str, type[Regularized]] = {
    "SGD": VRSGD,
    "Adam": VRAdam,
    "AdamW": VRAdamW,
    "NAdam": VRNAdam,
    "RMSprop": VRRMSprop,
    "Adagrad": VRAdagrad,
    "Adadelta": VRAdadelta,
}
"""The regularized optimizers, by the name of their counterparts in `torch.optim`."""
