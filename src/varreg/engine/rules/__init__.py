"""Layer rules: what each sample contributes to the gradient of a layer's parameters. One file per kind of layer."""

from varreg.engine.rules import convolution, lookup, normalization, packed, products, recurrent
from varreg.engine.rules.packed import PACKED, STACKED_PACKED
from varreg.engine.rules.recurrent import STACKED
from varreg.engine.rules.rule import RULES, Call, Contributions, Rule, rule

__all__ = ["PACKED", "RULES", "STACKED", "STACKED_PACKED", "Call", "Contributions", "Rule", "rule"]
__all__ += ["convolution", "lookup", "normalization", "packed", "products", "recurrent"]
