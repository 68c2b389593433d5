"""Does it help? Data, models, training runs and comparisons. The core never imports this."""

from varreg.lab.api import Compared, compare
from varreg.lab.tasks import Split, Splits, Task

__all__ = ["Compared", "Split", "Splits", "Task", "compare"]
