"""Batch → moments: what each sample's gradient says, out of one ordinary backward pass."""

from varreg.engine.ledger import Moments, moments
from varreg.engine.modules import register_rule
from varreg.engine.observer import Observer, observe
from varreg.engine.summary import Summary

__all__ = ["Moments", "Observer", "Summary", "moments", "observe", "register_rule"]
