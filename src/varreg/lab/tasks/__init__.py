"""Tasks: data, models for them, and budgets."""

from varreg.lab.tasks.catalog import TASKS
from varreg.lab.tasks.definition import Split, Splits, Task

__all__ = ["TASKS", "Split", "Splits", "Task"]
