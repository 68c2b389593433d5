"""Batch → moments: measure every sample's contribution to the gradient in one ordinary backward
pass.
"""

from varreg.engine.mean_variance import Moments
from varreg.engine.mechanisms.by_module import register_rule
from varreg.engine.noise_summary import Summary
from varreg.engine.norm_report import Norms
from varreg.engine.observer import Observer, observe
from varreg.engine.parameters import is_observed, moments
from varreg.engine.totals import Totals

__all__ = [
    "Moments",
    "Norms",
    "Observer",
    "Summary",
    "Totals",
    "is_observed",
    "moments",
    "observe",
    "register_rule",
]
