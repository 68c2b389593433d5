"""The lab: data, models, training runs and comparisons of optimizers. The core never imports it."""

from varreg.lab.api import Compared, compare
from varreg.lab.tasks import Split, Splits, Task

__all__ = ["Compared", "Split", "Splits", "Task", "compare"]
