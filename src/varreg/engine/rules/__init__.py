"""Layer rules: they compute what each sample contributes to the gradients of a layer's parameters.
There is one file per kind of layer.
"""

from varreg.engine.rules import (
    convolution,
    embedding,
    linear,
    normalization,
    packed_recurrent,
    recurrent,
)
from varreg.engine.rules.packed_recurrent import PACKED, STACKED_PACKED
from varreg.engine.rules.recurrent import STACKED
from varreg.engine.rules.rule import RULES, Contributions, Rule, Use, rule

__all__ = ["PACKED", "RULES", "STACKED", "STACKED_PACKED", "Contributions", "Rule", "Use", "rule"]
__all__ += ["convolution", "embedding", "linear", "normalization", "packed_recurrent", "recurrent"]
