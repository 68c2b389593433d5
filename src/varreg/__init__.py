"""Gradient variance for PyTorch: measure how much the samples of a mini-batch disagree, and let it set the step."""

from varreg.engine import Moments, Observer, Summary, moments, observe, register_rule

__version__ = "0.1.0"
__all__ = ["Moments", "Observer", "Summary", "__version__", "moments", "observe", "register_rule"]
