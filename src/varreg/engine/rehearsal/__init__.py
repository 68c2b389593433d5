"""Run a model again, and restore everything afterwards."""

from varreg.engine.rehearsal.rehearse import Rehearsal, rehearsal

__all__ = ["Rehearsal", "rehearsal"]
