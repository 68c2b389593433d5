"""Running a model again without a trace."""

from varreg.engine.rehearsal.rehearse import Rehearsal, rehearsal

__all__ = ["Rehearsal", "rehearsal"]
