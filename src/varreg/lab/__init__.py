"""Does it help? Data, models, training runs and comparisons. The core never imports this."""

from varreg.lab.tasks import Split, Splits, Task

__all__ = ["Split", "Splits", "Task"]
