"""A live page about a running training, and its data."""

from varreg.monitor.journal import Journal, read
from varreg.monitor.monitor import Monitor
from varreg.monitor.recording import Recorder

__all__ = ["Journal", "Monitor", "Recorder", "read"]
