"""Layer rules: what each sample contributes to the gradient of a layer's parameters. One file per kind of layer."""

from varreg.engine.rules import convolution, lookup, normalization, products, recurrent
from varreg.engine.rules.recurrent import STACKED
from varreg.engine.rules.rule import RULES, Call, Contributions, Rule, rule

__all__ = ["RULES", "STACKED", "Call", "Contributions", "Rule", "rule"]
__all__ += ["convolution", "lookup", "normalization", "products", "recurrent"]
