"""`varreg list`: the available tasks and optimizers."""

from __future__ import annotations

import inspect

from varreg.lab import specs
from varreg.lab.optimizers import OPTIMIZERS
from varreg.lab.tasks import TASKS


def listing() -> str:
    """Return the tasks with their options, and the optimizers with their learning rates."""
    lines = ["Tasks, with their options:"]
    for name, function in TASKS.items():
        options = {p.name: p.default for p in inspect.signature(function).parameters.values()}
        lines.append(f"  {specs.spell(name, options):42} {_first_line(function.__doc__)}")
    lines.append("\nOptimizers, and the learning rates in which they are tuned:")
    for name, entry in OPTIMIZERS.items():
        tuned = f"{entry.low:g} to {entry.high:g}" if entry.low < entry.high else "no learning rate"
        lines.append(f"  {name:12}{tuned:20}{_first_line(entry.cls.__doc__)}")
    return "\n".join(lines)


def _first_line(doc: str | None) -> str:
    """Return the first line of a docstring."""
    return (doc or "").strip().partition("\n")[0]
