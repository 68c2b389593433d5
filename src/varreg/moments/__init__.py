"""Batch → moments: what each sample's gradient says, out of one ordinary backward pass."""

from varreg.moments.ledger import Moments, moments
from varreg.moments.observer import Observer, observe, register_rule
from varreg.moments.summary import Summary

__all__ = ["Moments", "Observer", "Summary", "moments", "observe", "register_rule"]
