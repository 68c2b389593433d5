"""The optimizers of the lab: torch's, ours, and related methods."""

from varreg.lab.optimizers.registry import OPTIMIZERS, Entry, build, check, entry, parse

__all__ = ["OPTIMIZERS", "Entry", "build", "check", "entry", "parse"]
