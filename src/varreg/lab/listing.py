"""`varreg list`: the available tasks and optimizers."""

from __future__ import annotations

import inspect
import re
import textwrap

from varreg.lab import specs
from varreg.lab.optimizers import OPTIMIZERS
from varreg.lab.tasks import TASKS

WIDTH = 100
"""Columns of a terminal."""


def listing() -> str:
    """Return the tasks with their options, and the optimizers with their learning rates."""
    lines = ["Tasks, with their options:"]
    for name, function in TASKS.items():
        options = {p.name: p.default for p in inspect.signature(function).parameters.values()}
        lines += _entry(specs.spell(name, options), 44, function.__doc__)
    lines.append("\nOptimizers, and the learning rates in which they are tuned:")
    names = 2 + max(map(len, OPTIMIZERS))
    for name, entry in OPTIMIZERS.items():
        tuned = f"{entry.low:g} to {entry.high:g}" if entry.low < entry.high else "no learning rate"
        lines += _entry(f"{name:{names}}{tuned}", names + 18, entry.cls.__doc__)
    return "\n".join(lines)


def _entry(words: str, column: int, doc: str | None) -> list[str]:
    """Return the lines of one name: its description begins at a column, or below longer words."""
    indent = " " * (column + 2)
    text = textwrap.wrap(_first_sentence(doc), WIDTH, initial_indent=indent,
                         subsequent_indent=indent, break_on_hyphens=False)  # fmt: skip
    first = f"  {words}"
    if text and len(words) < column:
        first += text.pop(0)[len(first) :]
    return [first, *text]


def _first_sentence(doc: str | None) -> str:
    r"""Return the first sentence of a docstring.

    >>> _first_sentence("A step (Ivgi et al. 2023): x ← x,\n    of S2.4. More of it.")
    'A step (Ivgi et al. 2023): x ← x, of S2.4.'
    """
    paragraph = " ".join((doc or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[^\W\d])", paragraph)[0]
