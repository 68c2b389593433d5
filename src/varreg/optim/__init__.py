"""λ → step: torch's optimizers, regularized.

`varreg` exports the names in `__all__`; the lab, the theory and the benchmarks use all optimizers
in `REGULARIZED`.

To add an optimizer, change five files ("A new optimizer" in CONTRIBUTING.md has the details):

1. `src/varreg/optim/<name>.py`: the variance of its increment, and its class.
2. This file: its import, and its rows in `__all__` and `REGULARIZED`.
3. `tests/support/update_rules.py`: its formula, written out over all past gradients.
4. `tests/support/optimizer_table.py`: a row with its settings.
5. `docs/reference/api.md`: its entry.
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
