"""`varreg.verify`: compare the moments with their definition, one sample at a time."""

from varreg.verification.entry import verify
from varreg.verification.result import Row, Verification

__all__ = ["Row", "Verification", "verify"]
